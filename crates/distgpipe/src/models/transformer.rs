//! A transformer encoder with a classifier, as RoBERTa is built and named: embeddings, then per layer the attention and
//! the feed-forward part as separate layers (so that a cut may fall between them), then the head on token 0.
//!
//! The input is token ids and the attention mask (1 where there is a token). The mask travels with the activations.

use super::{recipe, require, ModelError};
use crate::failure::Fault;
use crate::layer::{Context, Init, Layer, Own, SampleShape, ShapeError, SkipShapes, TensorSpec};
use crate::layers::{LayerNorm, Linear};
use crate::model::Model;
use serde::{Deserialize, Serialize};
use std::sync::Arc;
use tch::{Kind, Tensor};

/// Settings; the default is RoBERTa-base.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct Transformer {
    /// Encoder layers.
    pub layers: usize,
    /// Width.
    pub hidden: i64,
    /// Attention heads; they divide the width.
    pub heads: i64,
    /// Width of the feed-forward part.
    pub feed_forward: i64,
    /// Different tokens.
    pub vocabulary: i64,
    /// Tokens of a sample.
    pub tokens: i64,
    /// Rows of the position table; RoBERTa's first two are not positions.
    pub positions: i64,
    /// Outputs.
    pub classes: i64,
    /// Everywhere.
    pub dropout: f64,
    /// Of the layer norms.
    pub eps: f64,
}

impl Default for Transformer {
    fn default() -> Self {
        Transformer {
            layers: 12,
            hidden: 768,
            heads: 12,
            feed_forward: 3072,
            vocabulary: 50_265,
            tokens: 128,
            positions: 514,
            classes: 2,
            dropout: 0.1,
            eps: 1e-5,
        }
    }
}

/// RoBERTa counts positions from 2; 1 is the padding's.
const PADDING_POSITION: i64 = 1;

impl Transformer {
    /// The list of layers.
    pub fn model(&self) -> Result<Model, ModelError> {
        let name = "transformer";
        let sizes = [self.hidden, self.heads, self.feed_forward, self.vocabulary, self.tokens, self.classes];
        require(sizes.iter().all(|&n| (1..=1 << 24).contains(&n)), name, "all sizes must be 1 to 2^24")?;
        require(self.layers <= 10_000, name, "layers must be at most 10000")?;
        require(self.hidden % self.heads == 0, name, "heads must divide hidden")?;
        require(self.positions >= self.tokens + 2, name, "positions must be at least tokens + 2")?;
        require((0.0..1.0).contains(&self.dropout), name, "dropout must be at least 0 and below 1")?;
        let settings = Arc::new(self.clone());
        let mut layers: Vec<Arc<dyn Layer>> = Vec::new();
        let mut push =
            |name: String, part: Part| layers.push(Arc::new(Piece { name, part, settings: settings.clone() }));
        push("embeddings".to_owned(), Part::Embeddings);
        for i in 0..self.layers {
            push(format!("encoder.layer.{i}.attention"), Part::Attention);
            push(format!("encoder.layer.{i}"), Part::FeedForward);
        }
        push("classifier".to_owned(), Part::Classifier);
        let input = vec![SampleShape::int(&[self.tokens]), SampleShape::int(&[self.tokens])];
        Ok(Model { layers, input, recipe: recipe(name, self) })
    }
}

enum Part {
    Embeddings,
    Attention,
    FeedForward,
    Classifier,
}

struct Piece {
    name: String,
    part: Part,
    settings: Arc<Transformer>,
}

impl Piece {
    fn linear(&self, prefix: &str, from: i64, to: i64) -> Vec<TensorSpec> {
        Linear { from, to }.tensors_from(prefix, WEIGHT, Init::Constant(0.0))
    }

    fn norm(&self) -> LayerNorm {
        LayerNorm { features: self.settings.hidden, eps: self.settings.eps }
    }
}

/// The paper's first values of all weights.
const WEIGHT: Init = Init::Normal { deviation: 0.02 };

impl Layer for Piece {
    fn name(&self) -> &str {
        &self.name
    }

    fn tensors(&self) -> Vec<TensorSpec> {
        let (s, name) = (&self.settings, &self.name);
        let table =
            |what: &str, rows| TensorSpec::parameter(format!("{name}.{what}.weight"), &[rows, s.hidden], WEIGHT);
        match self.part {
            Part::Embeddings => {
                let mut all = vec![
                    table("word_embeddings", s.vocabulary),
                    table("position_embeddings", s.positions),
                    table("token_type_embeddings", 1),
                ];
                all.extend(self.norm().tensors(&format!("{name}.LayerNorm")));
                all
            }
            Part::Attention => {
                let mut all = Vec::new();
                for which in ["self.query", "self.key", "self.value", "output.dense"] {
                    all.extend(self.linear(&format!("{name}.{which}"), s.hidden, s.hidden));
                }
                all.extend(self.norm().tensors(&format!("{name}.output.LayerNorm")));
                all
            }
            Part::FeedForward => {
                let mut all = self.linear(&format!("{name}.intermediate.dense"), s.hidden, s.feed_forward);
                all.extend(self.linear(&format!("{name}.output.dense"), s.feed_forward, s.hidden));
                all.extend(self.norm().tensors(&format!("{name}.output.LayerNorm")));
                all
            }
            Part::Classifier => {
                let mut all = self.linear(&format!("{name}.dense"), s.hidden, s.hidden);
                all.extend(self.linear(&format!("{name}.out_proj"), s.hidden, s.classes));
                all
            }
        }
    }

    fn shapes(&self, input: Vec<SampleShape>, _: &mut SkipShapes) -> Result<Vec<SampleShape>, ShapeError> {
        let s = &self.settings;
        let mask = SampleShape::int(&[s.tokens]);
        let hidden = SampleShape::float(&[s.tokens, s.hidden]);
        let expected = match self.part {
            Part::Embeddings => vec![SampleShape::int(&[s.tokens]), mask.clone()],
            _ => vec![hidden.clone(), mask.clone()],
        };
        if input != expected {
            return Err(ShapeError { layer: self.name.clone(), expected: format!("{expected:?}"), got: input });
        }
        Ok(match self.part {
            Part::Classifier => vec![SampleShape::float(&[s.classes])],
            _ => vec![hidden, mask],
        })
    }

    fn forward(
        &self,
        own: &mut Own<'_>,
        mut input: Vec<Tensor>,
        context: &mut Context<'_>,
    ) -> Result<Vec<Tensor>, Fault> {
        let mask = input.swap_remove(1);
        let x = input.swap_remove(0);
        let y = match self.part {
            Part::Embeddings => self.embed(own, &x, &mask, context)?,
            Part::Attention => self.attend(own, &x, &mask, context)?,
            Part::FeedForward => self.feed_forward(own, &x, context)?,
            Part::Classifier => return Ok(vec![self.classify(own, &x, context)?]),
        };
        Ok(vec![y, mask])
    }

    fn multiply_adds(&self, _: &[SampleShape]) -> u64 {
        let s = &self.settings;
        let count = match self.part {
            Part::Embeddings => 0,
            Part::Attention => 4 * s.tokens * s.hidden * s.hidden + 2 * s.tokens * s.tokens * s.hidden,
            Part::FeedForward => 2 * s.tokens * s.hidden * s.feed_forward,
            Part::Classifier => s.hidden * s.hidden + s.hidden * s.classes,
        };
        u64::try_from(count).unwrap_or(0)
    }
}

impl Piece {
    fn embed(
        &self,
        own: &mut Own<'_>,
        ids: &Tensor,
        mask: &Tensor,
        context: &mut Context<'_>,
    ) -> Result<Tensor, Fault> {
        let (words, positions, types) = (own.next(), own.next(), own.next());
        // Tokens count up from 2, the padding stays at 1.
        let place = mask.f_cumsum(1, Kind::Int64)?.f_mul(mask)?.f_add_scalar(PADDING_POSITION)?;
        let sum = Tensor::f_embedding(words, ids, -1, false, false)?
            .f_add(&Tensor::f_embedding(positions, &place, -1, false, false)?)?
            .f_add(types)?;
        let normed = self.norm().forward(own, &sum)?;
        context.dropout(normed, self.settings.dropout)
    }

    fn attend(&self, own: &mut Own<'_>, x: &Tensor, mask: &Tensor, context: &mut Context<'_>) -> Result<Tensor, Fault> {
        let s = &self.settings;
        let linear = Linear { from: s.hidden, to: s.hidden };
        let size = x.size();
        let (rows, tokens, width) = (size[0], size[1], s.hidden / s.heads);
        let mut project = || -> Result<Tensor, Fault> {
            Ok(linear.forward(own, x)?.f_view([rows, tokens, s.heads, width])?.f_transpose(1, 2)?)
        };
        let (query, key, value) = (project()?, project()?, project()?);
        let hidden_keys = mask.f_eq(0)?.f_view([rows, 1, 1, tokens])?;
        let mixed = if context.training() && s.dropout > 0.0 {
            // Written out, because libtorch's fused attention draws its dropout from the global generator.
            let scores = query.f_matmul(&key.f_transpose(-2, -1)?)?.f_div_scalar((width as f64).sqrt())?;
            let scores = scores.f_masked_fill(&hidden_keys, f64::from(f32::MIN))?;
            let weights = context.dropout(scores.f_softmax(-1, None)?, s.dropout)?;
            weights.f_matmul(&value)?
        } else {
            let visible = hidden_keys.f_logical_not()?;
            Tensor::f_scaled_dot_product_attention(&query, &key, &value, Some(visible), 0.0, false, None, false)?
        };
        let mixed = mixed.f_transpose(1, 2)?.f_reshape([rows, tokens, s.hidden])?;
        let out = context.dropout(linear.forward(own, &mixed)?, s.dropout)?;
        self.norm().forward(own, &out.f_add(x)?)
    }

    fn feed_forward(&self, own: &mut Own<'_>, x: &Tensor, context: &mut Context<'_>) -> Result<Tensor, Fault> {
        let s = &self.settings;
        let inner = Linear { from: s.hidden, to: s.feed_forward }.forward(own, x)?.f_gelu("none")?;
        let out = Linear { from: s.feed_forward, to: s.hidden }.forward(own, &inner)?;
        let out = context.dropout(out, s.dropout)?;
        self.norm().forward(own, &out.f_add(x)?)
    }

    fn classify(&self, own: &mut Own<'_>, x: &Tensor, context: &mut Context<'_>) -> Result<Tensor, Fault> {
        let s = &self.settings;
        let first = context.dropout(x.f_select(1, 0)?, s.dropout)?;
        let dense = Linear { from: s.hidden, to: s.hidden }.forward(own, &first)?.f_tanh()?;
        let dense = context.dropout(dense, s.dropout)?;
        Linear { from: s.hidden, to: s.classes }.forward(own, &dense)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_default_has_the_parameters_of_roberta_base_with_two_labels() {
        assert_eq!(Transformer::default().model().unwrap().parameters(), 124_647_170);
    }
}
