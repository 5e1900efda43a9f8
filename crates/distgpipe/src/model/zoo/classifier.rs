//! The head that the image classifiers share: the average over the image, dropout, a linear map.

use crate::failure::Fault;
use crate::layer::{Context, Init, Layer, Own, SampleShape, ShapeError, SkipShapes, TensorSpec};
use crate::layers::Linear;
use tch::Tensor;

/// Scores from the first of the tensors it gets; others (AmoebaNet's second state) end here.
pub(super) struct Classifier {
    /// Of the layer.
    pub name: &'static str,
    /// Of the linear map's tensors.
    pub prefix: &'static str,
    /// Before the linear map.
    pub dropout: f64,
    /// From channels to classes.
    pub linear: Linear,
    /// First values of weight and bias.
    pub init: [Init; 2],
}

impl Layer for Classifier {
    fn name(&self) -> &str {
        self.name
    }

    fn tensors(&self) -> Vec<TensorSpec> {
        let [weight, bias] = self.init;
        self.linear.tensors_from(self.prefix, weight, bias)
    }

    fn shapes(&self, input: Vec<SampleShape>, _: &mut SkipShapes) -> Result<Vec<SampleShape>, ShapeError> {
        match input.first().map(|x| (&x.dims[..], x.kind)) {
            Some(([c, _, _], kind)) if *c == self.linear.from => {
                Ok(vec![SampleShape { dims: vec![self.linear.to], kind }])
            }
            _ => Err(ShapeError {
                layer: self.name.to_owned(),
                expected: format!("[{}, height, width]", self.linear.from),
                got: input,
            }),
        }
    }

    fn forward(&self, own: &mut Own<'_>, input: Vec<Tensor>, context: &mut Context<'_>) -> Result<Vec<Tensor>, Fault> {
        let size = input[0].size();
        let whole = [size[2], size[3]];
        // Not libtorch's adaptive pool: its gradient lies channel by channel, whatever the image's layout. A gradient that
        // comes over a link lies as the image does, and the norms before would round it in another order.
        let pooled = input[0].f_avg_pool2d(whole, whole, [0, 0], false, true, None::<i64>)?.f_flatten(1, -1)?;
        let dropped = context.dropout(pooled, self.dropout)?;
        Ok(vec![self.linear.forward(own, &dropped)?])
    }

    fn multiply_adds(&self, _: &[SampleShape]) -> u64 {
        u64::try_from(self.linear.from * self.linear.to).unwrap_or(0)
    }
}
