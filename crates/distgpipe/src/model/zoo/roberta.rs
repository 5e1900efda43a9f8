//! RoBERTa for sequence classification (Liu et al. 2019), as Hugging Face builds and names it: embeddings, then per
//! encoder layer the attention and the feed-forward part as separate layers (so that a cut may fall between them), then
//! the head on token 0. [`Roberta::from_hugging_face`] takes the sizes from a `config.json`.
//!
//! The input is token ids and the attention mask (1 where there is a token). The mask travels with the activations.

use super::{model_spec, require, ModelError};
use crate::failure::Fault;
use crate::model::blocks::{LayerNorm, Linear};
use crate::model::layer::{Context, Init, Layer, LayerTensors, SampleShape, ShapeError, SkipShapes, TensorSpec};
use crate::model::Model;
use serde::{Deserialize, Serialize};
use std::sync::Arc;
use tch::{Kind, Tensor};

/// The settings of RoBERTa. The default is RoBERTa-base.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct Roberta {
    /// Encoder layers.
    pub layers: usize,
    /// The hidden size.
    pub hidden: i64,
    /// Attention heads; must divide the hidden size.
    pub heads: i64,
    /// The hidden size of the feed-forward network.
    pub feed_forward: i64,
    /// The size of the vocabulary.
    pub vocabulary: i64,
    /// Tokens per sample.
    pub tokens: i64,
    /// Rows of the position embedding. Positions start at `padding` + 1.
    pub positions: i64,
    /// Rows of the token-type embedding. Every token has type 0.
    pub token_types: i64,
    /// The padding token. Its rows in the embeddings are not trained.
    pub padding: i64,
    /// The number of classes.
    pub classes: i64,
    /// Dropout probability, except where the next two fields apply.
    pub dropout: f64,
    /// Dropout probability of attention weights.
    pub attention_dropout: Option<f64>,
    /// Dropout probability in the classification head.
    pub classifier_dropout: Option<f64>,
    /// The epsilon of the layer norms.
    pub eps: f64,
}

impl Default for Roberta {
    fn default() -> Self {
        Roberta {
            layers: 12,
            hidden: 768,
            heads: 12,
            feed_forward: 3072,
            vocabulary: 50_265,
            tokens: 128,
            positions: 514,
            token_types: 1,
            padding: 1,
            classes: 2,
            dropout: 0.1,
            attention_dropout: None,
            classifier_dropout: None,
            eps: 1e-5,
        }
    }
}

impl Roberta {
    /// Builds the list of layers.
    ///
    /// # Errors
    /// If a setting is out of range.
    pub fn model(&self) -> Result<Model, ModelError> {
        let name = "roberta";
        let widths = [self.hidden, self.heads, self.feed_forward, self.tokens];
        require(widths.iter().all(|&n| (1..=1 << 20).contains(&n)), name, "all widths must be 1 to 2^20")?;
        let tables = [self.vocabulary, self.positions, self.token_types, self.classes];
        require(tables.iter().all(|&n| (1..=1 << 24).contains(&n)), name, "all tables must have 1 to 2^24 rows")?;
        require((0..self.vocabulary).contains(&self.padding), name, "padding must be a token of the vocabulary")?;
        require(self.layers <= 10_000, name, "layers must be at most 10000")?;
        require(self.hidden % self.heads == 0, name, "heads must divide hidden")?;
        require(
            self.positions > self.tokens + self.padding,
            name,
            "positions must be at least tokens + padding + 1: set fewer tokens",
        )?;
        let dropouts = [Some(self.dropout), self.attention_dropout, self.classifier_dropout];
        require(
            dropouts.iter().flatten().all(|p| (0.0..1.0).contains(p)),
            name,
            "every dropout must be at least 0 and below 1",
        )?;
        let settings = Arc::new(self.clone());
        let mut layers: Vec<Arc<dyn Layer>> = Vec::new();
        let mut push = |name: String, part: RobertaLayer| {
            layers.push(Arc::new(NamedRobertaLayer { name, part, settings: settings.clone() }))
        };
        push("embeddings".to_owned(), RobertaLayer::Embeddings);
        for i in 0..self.layers {
            push(format!("encoder.layer.{i}.attention"), RobertaLayer::Attention);
            push(format!("encoder.layer.{i}"), RobertaLayer::FeedForward);
        }
        push("classifier".to_owned(), RobertaLayer::Classifier);
        let input = vec![SampleShape::int(&[self.tokens]), SampleShape::int(&[self.tokens])];
        Ok(Model::new(layers, input).with_spec(model_spec(name, self)))
    }
}

/// The fields of Hugging Face's `config.json` that determine the architecture. Sizes are required; the others default to
/// the values of Hugging Face's `RobertaConfig`.
#[derive(Deserialize)]
struct HuggingFaceConfig {
    model_type: String,
    num_hidden_layers: usize,
    hidden_size: i64,
    num_attention_heads: i64,
    intermediate_size: i64,
    vocab_size: i64,
    max_position_embeddings: i64,
    #[serde(default = "two")]
    type_vocab_size: i64,
    #[serde(default = "one")]
    pad_token_id: i64,
    #[serde(default = "a_trillionth")]
    layer_norm_eps: f64,
    #[serde(default = "a_tenth")]
    hidden_dropout_prob: f64,
    #[serde(default = "a_tenth")]
    attention_probs_dropout_prob: f64,
    classifier_dropout: Option<f64>,
    hidden_act: Option<String>,
    position_embedding_type: Option<String>,
    #[serde(default)]
    is_decoder: bool,
    num_labels: Option<i64>,
    id2label: Option<serde_json::Map<String, serde_json::Value>>,
}

fn one() -> i64 {
    1
}

fn two() -> i64 {
    2
}

fn a_tenth() -> f64 {
    0.1
}

fn a_trillionth() -> f64 {
    1e-12
}

/// The Hugging Face model types that differ from RoBERTa in name only.
const HUGGING_FACE_TYPES: [&str; 3] = ["roberta", "xlm-roberta", "camembert"];

impl Roberta {
    /// The settings in a `config.json` of Hugging Face. Samples have the default length, or less if the position embedding is
    /// shorter.
    pub fn from_hugging_face(config: &str) -> Result<Self, ModelError> {
        let wrong = |why: String| ModelError::settings("roberta", format!("Hugging Face's config.json: {why}"));
        let config: HuggingFaceConfig = serde_json::from_str(config).map_err(|e| wrong(e.to_string()))?;
        let must = |key: &str, got: &str, expected: &[&str]| {
            let fits = expected.contains(&got);
            fits.then_some(()).ok_or_else(|| wrong(format!("expected {key} = {}, got {got}", expected.join(" or "))))
        };
        must("model_type", &config.model_type, &HUGGING_FACE_TYPES)?;
        must("hidden_act", config.hidden_act.as_deref().unwrap_or("gelu"), &["gelu"])?;
        let positions = config.position_embedding_type.as_deref().unwrap_or("absolute");
        must("position_embedding_type", positions, &["absolute"])?;
        must("is_decoder", if config.is_decoder { "true" } else { "false" }, &["false"])?;
        let standard = Roberta::default();
        let labels = config.id2label.and_then(|labels| i64::try_from(labels.len()).ok());
        let longest = config.max_position_embeddings.saturating_sub(config.pad_token_id).saturating_sub(1);
        Ok(Roberta {
            layers: config.num_hidden_layers,
            hidden: config.hidden_size,
            heads: config.num_attention_heads,
            feed_forward: config.intermediate_size,
            vocabulary: config.vocab_size,
            tokens: standard.tokens.min(longest),
            positions: config.max_position_embeddings,
            token_types: config.type_vocab_size,
            padding: config.pad_token_id,
            classes: config.num_labels.or(labels).unwrap_or(standard.classes),
            dropout: config.hidden_dropout_prob,
            attention_dropout: Some(config.attention_probs_dropout_prob),
            classifier_dropout: config.classifier_dropout,
            eps: config.layer_norm_eps,
        })
    }
}

enum RobertaLayer {
    Embeddings,
    Attention,
    FeedForward,
    Classifier,
}

struct NamedRobertaLayer {
    name: String,
    part: RobertaLayer,
    settings: Arc<Roberta>,
}

impl NamedRobertaLayer {
    fn linear(&self, prefix: &str, from: i64, to: i64) -> Vec<TensorSpec> {
        Linear { from, to }.tensors_from(prefix, WEIGHT, Init::Constant(0.0))
    }

    fn norm(&self) -> LayerNorm {
        LayerNorm { features: self.settings.hidden, eps: self.settings.eps }
    }
}

/// The paper's initialization of all weights.
const WEIGHT: Init = Init::Normal { deviation: 0.02 };

impl Layer for NamedRobertaLayer {
    fn name(&self) -> &str {
        &self.name
    }

    fn reads_parameters_for_gradients_only(&self) -> bool {
        true
    }

    fn tensors(&self) -> Vec<TensorSpec> {
        let (s, name) = (&self.settings, &self.name);
        let table =
            |what: &str, rows| TensorSpec::parameter(format!("{name}.{what}.weight"), &[rows, s.hidden], WEIGHT);
        match self.part {
            RobertaLayer::Embeddings => {
                let mut all = vec![
                    table("word_embeddings", s.vocabulary),
                    table("position_embeddings", s.positions),
                    table("token_type_embeddings", s.token_types),
                ];
                all.extend(self.norm().tensors(&format!("{name}.LayerNorm")));
                all
            }
            RobertaLayer::Attention => {
                let mut all = Vec::new();
                for which in ["self.query", "self.key", "self.value", "output.dense"] {
                    all.extend(self.linear(&format!("{name}.{which}"), s.hidden, s.hidden));
                }
                all.extend(self.norm().tensors(&format!("{name}.output.LayerNorm")));
                all
            }
            RobertaLayer::FeedForward => {
                let mut all = self.linear(&format!("{name}.intermediate.dense"), s.hidden, s.feed_forward);
                all.extend(self.linear(&format!("{name}.output.dense"), s.feed_forward, s.hidden));
                all.extend(self.norm().tensors(&format!("{name}.output.LayerNorm")));
                all
            }
            RobertaLayer::Classifier => {
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
            RobertaLayer::Embeddings => vec![SampleShape::int(&[s.tokens]), mask.clone()],
            _ => vec![hidden.clone(), mask.clone()],
        };
        if input != expected {
            return Err(ShapeError { layer: self.name.clone(), expected: format!("{expected:?}"), got: input });
        }
        Ok(match self.part {
            RobertaLayer::Classifier => vec![SampleShape::float(&[s.classes])],
            _ => vec![hidden, mask],
        })
    }

    fn forward(
        &self,
        tensors: &mut LayerTensors<'_>,
        mut input: Vec<Tensor>,
        context: &mut Context<'_>,
    ) -> Result<Vec<Tensor>, Fault> {
        let mask = input.swap_remove(1);
        let x = input.swap_remove(0);
        let y = match self.part {
            RobertaLayer::Embeddings => self.embed(tensors, &x, context)?,
            RobertaLayer::Attention => self.attend(tensors, &x, &mask, context)?,
            RobertaLayer::FeedForward => self.feed_forward(tensors, &x, context)?,
            RobertaLayer::Classifier => return Ok(vec![self.classify(tensors, &x, context)?]),
        };
        Ok(vec![y, mask])
    }

    fn multiply_adds(&self, _: &[SampleShape]) -> u64 {
        let s = &self.settings;
        let count = match self.part {
            RobertaLayer::Embeddings => 0,
            RobertaLayer::Attention => 4 * s.tokens * s.hidden * s.hidden + 2 * s.tokens * s.tokens * s.hidden,
            RobertaLayer::FeedForward => 2 * s.tokens * s.hidden * s.feed_forward,
            RobertaLayer::Classifier => s.hidden * s.hidden + s.hidden * s.classes,
        };
        u64::try_from(count).unwrap_or(0)
    }
}

impl NamedRobertaLayer {
    fn embed(&self, tensors: &mut LayerTensors<'_>, ids: &Tensor, context: &mut Context<'_>) -> Result<Tensor, Fault> {
        let (words, positions, types) = (tensors.next(), tensors.next(), tensors.next());
        // Token positions count up from `padding` + 1 and padding has position `padding`. The ids say what is padding, not the
        // mask.
        let padding = self.settings.padding;
        let token = ids.f_ne(padding)?.f_to_kind(Kind::Int64)?;
        let place = token.f_cumsum(1, Kind::Int64)?.f_mul(&token)?.f_add_scalar(padding)?;
        let sum = Tensor::f_embedding(words, ids, padding, false, false)?
            .f_add(&Tensor::f_embedding(positions, &place, padding, false, false)?)?
            .f_add(&types.f_select(0, 0)?)?;
        let normed = self.norm().forward(tensors, &sum)?;
        context.dropout(normed, self.settings.dropout)
    }

    fn attend(
        &self,
        tensors: &mut LayerTensors<'_>,
        x: &Tensor,
        mask: &Tensor,
        context: &mut Context<'_>,
    ) -> Result<Tensor, Fault> {
        let s = &self.settings;
        let linear = Linear { from: s.hidden, to: s.hidden };
        let size = x.size();
        let (rows, tokens, width) = (size[0], size[1], s.hidden / s.heads);
        let mut project = || -> Result<Tensor, Fault> {
            Ok(linear.forward(tensors, x)?.f_view([rows, tokens, s.heads, width])?.f_transpose(1, 2)?)
        };
        let (query, key, value) = (project()?, project()?, project()?);
        let hidden_keys = mask.f_eq(0)?.f_view([rows, 1, 1, tokens])?;
        let dropout = s.attention_dropout.unwrap_or(s.dropout);
        let mixed = if context.training() && dropout > 0.0 {
            // Written out because libtorch's fused attention draws its dropout from the global generator.
            let scores = query.f_matmul(&key.f_transpose(-2, -1)?)?.f_div_scalar((width as f64).sqrt())?;
            // The lowest finite value of the scores' own type: bfloat16's range is a little smaller than float32's.
            let least = f32::from_bits(if scores.kind() == Kind::BFloat16 { 0xff7f_0000 } else { f32::MIN.to_bits() });
            let scores = scores.f_masked_fill(&hidden_keys, f64::from(least))?;
            let weights = context.dropout(scores.f_softmax(-1, None)?, dropout)?;
            weights.f_matmul(&value)?
        } else {
            let visible = hidden_keys.f_logical_not()?;
            Tensor::f_scaled_dot_product_attention(&query, &key, &value, Some(visible), 0.0, false, None, false)?
        };
        let mixed = mixed.f_transpose(1, 2)?.f_reshape([rows, tokens, s.hidden])?;
        let out = context.dropout(linear.forward(tensors, &mixed)?, s.dropout)?;
        self.norm().forward(tensors, &out.f_add(x)?)
    }

    fn feed_forward(
        &self,
        tensors: &mut LayerTensors<'_>,
        x: &Tensor,
        context: &mut Context<'_>,
    ) -> Result<Tensor, Fault> {
        let s = &self.settings;
        let inner = Linear { from: s.hidden, to: s.feed_forward }.forward(tensors, x)?.f_gelu("none")?;
        let out = Linear { from: s.feed_forward, to: s.hidden }.forward(tensors, &inner)?;
        let out = context.dropout(out, s.dropout)?;
        self.norm().forward(tensors, &out.f_add(x)?)
    }

    fn classify(&self, tensors: &mut LayerTensors<'_>, x: &Tensor, context: &mut Context<'_>) -> Result<Tensor, Fault> {
        let s = &self.settings;
        let dropout = s.classifier_dropout.unwrap_or(s.dropout);
        let first = context.dropout(x.f_select(1, 0)?, dropout)?;
        let dense = Linear { from: s.hidden, to: s.hidden }.forward(tensors, &first)?.f_tanh()?;
        let dense = context.dropout(dense, dropout)?;
        Linear { from: s.hidden, to: s.classes }.forward(tensors, &dense)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_default_has_the_parameters_of_roberta_base_with_two_labels() {
        assert_eq!(Roberta::default().model().unwrap().parameters(), 124_647_170);
    }

    const CONFIG: &str = r#"{
        "architectures": ["RobertaForSequenceClassification"], "model_type": "roberta", "hidden_act": "gelu",
        "num_hidden_layers": 2, "hidden_size": 24, "num_attention_heads": 3, "intermediate_size": 48, "vocab_size": 60,
        "max_position_embeddings": 40, "type_vocab_size": 2, "layer_norm_eps": 1e-6, "pad_token_id": 1,
        "hidden_dropout_prob": 0.2, "attention_probs_dropout_prob": 0.3, "classifier_dropout": null,
        "id2label": {"0": "no", "1": "maybe", "2": "yes"}, "torch_dtype": "float32"
    }"#;

    #[test]
    fn a_config_of_hugging_face_says_every_size() {
        let expected = Roberta {
            layers: 2,
            hidden: 24,
            heads: 3,
            feed_forward: 48,
            vocabulary: 60,
            tokens: 38,
            positions: 40,
            token_types: 2,
            padding: 1,
            classes: 3,
            dropout: 0.2,
            attention_dropout: Some(0.3),
            classifier_dropout: None,
            eps: 1e-6,
        };
        let got = Roberta::from_hugging_face(CONFIG).unwrap();
        assert_eq!(got, expected);
        // Counted by hand: tables and their norm; two layers; the head.
        let layer = 4 * (24 * 24 + 24) + 2 * 24 * 48 + 48 + 24 + 4 * 24;
        let count = (60 + 40 + 2 + 2) * 24 + 2 * layer + 24 * 24 + 24 + 24 * 3 + 3;
        assert_eq!(got.model().unwrap().parameters(), count);
    }

    #[test]
    fn a_config_that_is_no_roberta_is_refused_by_key() {
        let error = |from: &str, to: &str| {
            assert!(CONFIG.contains(from));
            Roberta::from_hugging_face(&CONFIG.replace(from, to)).unwrap_err().to_string()
        };
        let refused = error(r#""hidden_act": "gelu""#, r#""hidden_act": "relu""#);
        assert!(refused.contains("expected hidden_act = gelu, got relu"), "{refused}");
        let refused = error(r#""model_type": "roberta""#, r#""model_type": "gpt2""#);
        assert!(refused.contains("expected model_type = roberta or xlm-roberta or camembert, got gpt2"), "{refused}");
        let refused = error(r#""hidden_size": 24,"#, "");
        assert!(refused.contains("missing field `hidden_size`"), "{refused}");
        assert!(Roberta::from_hugging_face("").is_err());
        let odd =
            Roberta::from_hugging_face(&CONFIG.replace(r#""num_attention_heads": 3"#, r#""num_attention_heads": 5"#));
        assert!(odd.unwrap().model().err().unwrap().to_string().contains("heads must divide hidden"));
    }
}
