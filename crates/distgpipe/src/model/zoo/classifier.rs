//! The classification head that image models share: global average pool, dropout, linear map.

use crate::failure::Fault;
use crate::model::blocks::Linear;
use crate::model::layer::{Context, Init, Layer, LayerTensors, SampleShape, ShapeError, SkipShapes, TensorSpec};
use tch::Tensor;

/// Computes class scores from its first input tensor and drops the others (AmoebaNet's second state).
pub(super) struct Classifier {
    /// The layer's name.
    pub name: &'static str,
    /// The prefix of the linear map's tensors.
    pub prefix: &'static str,
    /// Dropout probability before the linear map.
    pub dropout: f64,
    /// The map from channels to classes.
    pub linear: Linear,
    /// Initialization of weight and bias.
    pub init: [Init; 2],
}

impl Layer for Classifier {
    fn name(&self) -> &str {
        self.name
    }

    fn reads_parameters_for_gradients_only(&self) -> bool {
        true
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

    fn forward(
        &self,
        tensors: &mut LayerTensors<'_>,
        input: Vec<Tensor>,
        context: &mut Context<'_>,
    ) -> Result<Vec<Tensor>, Fault> {
        let size = input[0].size();
        let whole = [size[2], size[3]];
        // Not libtorch's adaptive pool, whose gradient is always contiguous, whatever the layout of the image. A gradient
        // that arrives over a link has the image's layout, so the batch norms before this layer would sum in another order.
        let pooled = input[0].f_avg_pool2d(whole, whole, [0, 0], false, true, None::<i64>)?.f_flatten(1, -1)?;
        let dropped = context.dropout(pooled, self.dropout)?;
        Ok(vec![self.linear.forward(tensors, &dropped)?])
    }

    fn multiply_adds(&self, _: &[SampleShape]) -> u64 {
        u64::try_from(self.linear.from * self.linear.to).unwrap_or(0)
    }
}
