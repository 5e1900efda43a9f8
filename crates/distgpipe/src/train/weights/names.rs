//! The names of tensors in files. The models here use the names of torchvision and Hugging Face. Files differ from them in these
//! ways:
//!
//! - `torch.nn.DataParallel` prefixes every name with `module.`.
//! - Hugging Face prefixes the body's names with `roberta.` in models with a head. Files are written in this form, which
//!   `RobertaForSequenceClassification` loads.
//! - Old files call the weights of layer norms `gamma` and `beta`.
//! - Files have tensors that the models here do not use: see [`IGNORED`].

use crate::model::Model;

/// The batch counter of torch.nn.BatchNorm2d. Files from before 2018 do not have it; nothing depends on it.
pub(super) const COUNTER: &str = ".num_batches_tracked";

/// Prefixes of names that files have and the models here do not: the body's pooler, the head of the pretrained language model, and
/// the position numbers that old versions stored.
pub(super) const IGNORED: [&str; 3] = ["pooler.dense.", "lm_head.", "embeddings.position_ids"];

/// Prefix of every name in a model trained with torch.nn.DataParallel.
pub(super) const PARALLEL: &str = "module.";

/// Prefix of the body's names in Hugging Face models with a head.
pub(super) const BODY: &str = "roberta.";

/// The names that the model may have for a tensor of this name in a file.
pub(super) fn spellings(name: &str) -> Vec<String> {
    let body = name.strip_prefix(BODY).unwrap_or(name);
    let mut all = vec![name.to_owned(), body.to_owned()];
    for (old, new) in [(".gamma", ".weight"), (".beta", ".bias")] {
        all.extend(body.strip_suffix(old).map(|stem| format!("{stem}{new}")));
    }
    all
}

/// The name under which a tensor of the model is written to a file.
pub(super) fn public_name(model: &Model, name: &str) -> String {
    let roberta = model.spec.as_ref().is_some_and(|spec| spec.name == "roberta");
    if roberta && !name.starts_with("classifier.") {
        format!("{BODY}{name}")
    } else {
        name.to_owned()
    }
}
