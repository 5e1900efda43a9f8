//! Opens the data sets that flags name, and creates their loaders.

use crate::args::{DataName, LossName, NormaliseChoice, TrainFlags};
use crate::compute::cores;
use crate::exit::usage;
use crate::files::user_directory;
use crate::report;
use crate::report::units::plural;
use crate::saved_model::Normalisation;
use distgpipe::data::cifar::Edition;
use distgpipe::data::folder::Skipped;
use distgpipe::data::food101;
use distgpipe::data::glue::{token_length, Task};
use distgpipe::data::image::{self, ImageSource};
use distgpipe::data::synthetic::{Pattern, SyntheticOptions, Target};
use distgpipe::data::{
    Cifar, DataError, Dataset, Digits, Glue, ImageFiles, ImageSet, Loader, LoaderOptions, Split, Subset, Synthetic,
    TensorFiles, Text, Tokens,
};
use distgpipe::engine::{Device, Layout};
use distgpipe::{Fault, Loss, Model, SampleShape};
use std::cell::Cell;
use std::cmp::Ordering;
use std::path::{Path, PathBuf};
use std::sync::Arc;

/// The default of `--samples`.
const SAMPLES: usize = 2048;
/// Test batches are this many times larger than training batches: they keep nothing for a backward pass.
const TEST_BATCH_FACTOR: usize = 2;
/// The value of the darkest ink in the digits.
const INK_MAX: f64 = 16.0;
/// More threads would not load faster.
const LOADER_THREADS_MAX: usize = 64;

/// The training data, the test data unless evaluation is off, and the loss that suits the targets.
pub fn loaders(flags: &TrainFlags, model: &Model) -> anyhow::Result<(Loader, Option<Loader>, Loss)> {
    let source = Source::new(flags, model, Purpose::Training)?;
    let train = limited(source.open(Split::Train)?, "--limit", flags.limit)?;
    source.check_classes(train.as_ref())?;
    let batch_rows = flags.batch.unwrap_or_default();
    if batch_rows == 0 {
        return Err(usage("--batch 0: expected at least 1 row"));
    }
    let threads = threads(flags)?;
    let options = LoaderOptions { threads, ..LoaderOptions::training(batch_rows, flags.seed.unwrap_or_default()) };
    let samples = flags.samples.map(|samples| format!("--samples {samples}, ")).unwrap_or_default();
    let train = Loader::new(train, options).map_err(|e| usage(format!("{samples}--batch {batch_rows}: {e}")))?;
    if flags.no_evaluate == Some(true) {
        return Ok((train, None, source.loss()));
    }
    let test = source.open(Split::Test);
    let test = test.map_err(|e| usage(format!("{e}; to train without testing, add --no-evaluate")))?;
    let test = limited(test, "--limit-test", flags.limit_test.or(flags.limit))?;
    let options = LoaderOptions { threads, ..LoaderOptions::testing(test_rows(batch_rows)) };
    Ok((train, Some(Loader::new(test, options)?), source.loss()))
}

/// The test data alone, in batches of `--batch` rows, and the loss that suits its targets. `classes` are those of the trained
/// model, if they are known.
pub fn test_loader(flags: &TrainFlags, model: &Model, classes: Option<&[String]>) -> anyhow::Result<(Loader, Loss)> {
    let source = Source::new(flags, model, Purpose::Inference(classes))?;
    let test = limited(source.open(Split::Test)?, "--limit", flags.limit)?;
    source.check_classes(test.as_ref())?;
    let options = LoaderOptions { threads: threads(flags)?, ..LoaderOptions::testing(flags.batch.unwrap_or_default()) };
    Ok((Loader::new(test, options)?, source.loss()))
}

/// The rows of a test batch in a run with training batches of this size.
pub fn test_rows(batch_rows: usize) -> usize {
    batch_rows.saturating_mul(TEST_BATCH_FACTOR)
}

/// The names of the classes of a data set, if they have any.
pub fn class_names(flags: &TrainFlags, model: &Model) -> anyhow::Result<Option<Vec<String>>> {
    Ok(Source::new(flags, model, Purpose::Inference(None))?.open(Split::Test)?.class_names())
}

/// How the images of a data set are normalised with these flags; `None` for other data.
pub fn normalisation(name: DataName, flags: &TrainFlags) -> anyhow::Result<Option<Normalisation>> {
    Ok(match name {
        DataName::Digits => {
            let (mean, deviation) = Digits::normalisation()?;
            Some(Normalisation { mean: vec![mean / INK_MAX], deviation: vec![deviation / INK_MAX] })
        }
        DataName::Cifar10 | DataName::Cifar100 | DataName::Food101 | DataName::ImageFolder => {
            let each = |values: [f32; 3]| values.iter().map(|&value| f64::from(value)).collect();
            let (mean, deviation) = match flags.normalise.unwrap_or_default() {
                NormaliseChoice::ImageNet => (image::MEAN, image::DEVIATION),
                NormaliseChoice::Colours { mean, deviation } => (mean, deviation),
            };
            Some(Normalisation { mean: each(mean), deviation: each(deviation) })
        }
        DataName::Synthetic | DataName::Rte | DataName::Cola | DataName::Text | DataName::Tensors => None,
    })
}

/// Images, normalised as the flags say.
pub fn normalised<S: ImageSource>(set: ImageSet<S>, flags: &TrainFlags) -> Result<ImageSet<S>, DataError> {
    match flags.normalise.unwrap_or_default() {
        NormaliseChoice::ImageNet => Ok(set),
        NormaliseChoice::Colours { mean, deviation } => set.normalised_by(mean, deviation),
    }
}

/// The number of class scores in a model's output; `None` if it is something else.
pub fn scores(output: &SampleShape) -> Option<usize> {
    match output.dims[..] {
        [classes] => usize::try_from(classes).ok(),
        _ => None,
    }
}

/// The shape of a model's output.
pub fn output(model: &Model) -> anyhow::Result<SampleShape> {
    let output = model.summary()?.pop().and_then(|layer| layer.output.into_iter().next());
    output.ok_or_else(|| usage("--model: the model has no output"))
}

/// What data is opened for.
#[derive(Clone, Copy)]
enum Purpose<'a> {
    /// Training, for which the model can be chosen to suit the data.
    Training,
    /// Running a trained model, with its classes if they are known. The data must suit it.
    Inference(Option<&'a [String]>),
}

/// What to do about data that does not suit a trained model.
const SUITABLE: &str = "use data of the kind that the model was trained on";

/// The data set that flags name, for a model.
struct Source<'a> {
    name: DataName,
    flags: &'a TrainFlags,
    model: &'a Model,
    output: SampleShape,
    purpose: Purpose<'a>,
    /// The loss that suits the targets of a file of tensors, once it is open.
    tensors_loss: Cell<Option<Loss>>,
}

impl<'a> Source<'a> {
    fn new(flags: &'a TrainFlags, model: &'a Model, purpose: Purpose<'a>) -> anyhow::Result<Self> {
        let name = flags.data.unwrap_or(DataName::Digits);
        if flags.samples.is_some() && name != DataName::Synthetic {
            return Err(usage(format!(
                "--samples: it applies to --data synthetic only; use --limit to train on fewer rows of {}",
                name.name()
            )));
        }
        if flags.data_dir.is_some() && !name.has_files() {
            return Err(usage(format!(
                "--data-dir: --data {} reads no files: remove it, or name a data set that has some with --data",
                name.name()
            )));
        }
        if flags.tokenizer.is_some() && !matches!(name, DataName::Rte | DataName::Cola | DataName::Text) {
            return Err(usage(format!("--tokenizer: {} has no text: remove it", name.name())));
        }
        let colours = [DataName::Cifar10, DataName::Cifar100, DataName::Food101, DataName::ImageFolder];
        if flags.normalise.is_some() && !colours.contains(&name) {
            return Err(usage(format!("--normalise: {} has no images of three colours: remove it", name.name())));
        }
        let source = Source { name, flags, model, output: output(model)?, purpose, tensors_loss: Cell::new(None) };
        source.check_loss()?;
        Ok(source)
    }

    /// Whether the loss of `--loss` suits the model's output.
    fn check_loss(&self) -> anyhow::Result<()> {
        match (self.flags.loss, self.has_classes()) {
            (Some(LossName::CrossEntropy), false) => Err(usage(
                "--loss cross-entropy: the model's output is not a vector of class scores: use mean-squared or binary-cross-entropy",
            )),
            (Some(LossName::MeanSquared | LossName::BinaryCrossEntropy), true) => Err(usage(
                "--loss: the model's output is class scores, whose loss is cross-entropy: remove it",
            )),
            _ => Ok(()),
        }
    }

    /// Whether the loss is about classes.
    fn has_classes(&self) -> bool {
        scores(&self.output).is_some() || self.name == DataName::Text
    }

    fn open(&self, part: Split) -> anyhow::Result<Arc<dyn Dataset + Sync>> {
        match self.name {
            DataName::Synthetic => synthetic(self.flags, self.model, &self.output, part),
            DataName::Rte => text(Task::Rte, self.flags, self.model, part),
            DataName::Cola => text(Task::Cola, self.flags, self.model, part),
            DataName::Text => self.own_text(part),
            DataName::Tensors => self.own_tensors(part),
            name => open_images(name, self.flags, &self.model.input, part, self.purpose),
        }
    }

    /// Whether the model has a score for each class of the data.
    fn check_classes(&self, data: &dyn Dataset) -> anyhow::Result<()> {
        let Some(classes) = data.classes() else { return Ok(()) };
        let Some(scores) = scores(&self.output) else {
            return Err(usage(format!(
                "--data {}: the model's output is not a vector of class scores: use --data synthetic",
                self.name.name()
            )));
        };
        let counts = format!("the model has {scores} classes, and the data has {classes}");
        let settable = self.model.spec.as_ref().is_some_and(|spec| spec.settings.get("classes").is_some());
        let mismatch = match self.purpose {
            Purpose::Training if settable => format!("--model: {counts}: use --set classes={classes}"),
            Purpose::Training => format!("--model: {counts}: use a model with {classes} outputs"),
            Purpose::Inference(_) => format!("--data {}: {counts}: {SUITABLE}", self.name.name()),
        };
        match scores.cmp(&classes) {
            Ordering::Less => return Err(usage(mismatch)),
            Ordering::Equal => {}
            Ordering::Greater => report::note(&format!("warning: {mismatch}, unless more classes are intended")),
        }
        Ok(())
    }

    /// The text of `--data-dir`, for a model that scores the next token after each of its tokens.
    fn own_text(&self, part: Split) -> anyhow::Result<Arc<dyn Dataset + Sync>> {
        let Some(path) = &self.flags.data_dir else {
            return Err(usage("--data text: add --data-dir PATH, a file of text or a directory of .txt files"));
        };
        let length = match (self.model.input.as_slice(), &self.output.dims[..]) {
            ([tokens], [length, _]) if *tokens == SampleShape::int(&[*length]) => usize::try_from(*length).unwrap_or(0),
            _ => {
                return Err(usage(
                    "--data text: the model must take token numbers and give a score for every token of the vocabulary after \
                     each of them, such as a GPT exported from PyTorch",
                ))
            }
        };
        let text = Text::open(path, self.flags.tokenizer.as_deref(), length, part).map_err(data_error(self.name))?;
        let scored = self.output.dims.last().and_then(|&last| usize::try_from(last).ok()).unwrap_or(0);
        if scored < text.vocabulary() {
            return Err(usage(format!(
                "--data text: the tokenizer has {} tokens, and the model scores {scored}: use another --tokenizer (without one, every \
                 byte is a token), or export a model with a larger vocabulary",
                text.vocabulary()
            )));
        }
        Ok(Arc::new(text))
    }

    /// The tensors of `--data-dir`, for a model whose output they can be compared with.
    fn own_tensors(&self, part: Split) -> anyhow::Result<Arc<dyn Dataset + Sync>> {
        let Some(path) = &self.flags.data_dir else {
            return Err(usage("--data tensors: add --data-dir PATH, a safetensors file or a directory of .npy files"));
        };
        let wrong = |error: DataError| usage(format!("--data tensors: {error}"));
        let tensors = TensorFiles::open(path, &self.model.input, part).map_err(wrong)?;
        self.tensors_loss.set(Some(tensors.loss_for(&self.output).map_err(wrong)?));
        Ok(Arc::new(tensors))
    }

    fn loss(&self) -> Loss {
        match (self.tensors_loss.get(), self.flags.loss) {
            (Some(Loss::MeanSquared), Some(LossName::BinaryCrossEntropy)) => Loss::BinaryCrossEntropy,
            (Some(loss), _) => loss,
            _ if self.has_classes() => Loss::CrossEntropy,
            (None, Some(LossName::BinaryCrossEntropy)) => Loss::BinaryCrossEntropy,
            _ => Loss::MeanSquared,
        }
    }
}

/// Opens a split of an image data set, for a model with this input.
pub fn open(
    name: DataName,
    flags: &TrainFlags,
    input: &[SampleShape],
    part: Split,
) -> anyhow::Result<Arc<dyn Dataset + Sync>> {
    open_images(name, flags, input, part, Purpose::Training)
}

fn open_images(
    name: DataName,
    flags: &TrainFlags,
    input: &[SampleShape],
    part: Split,
    purpose: Purpose<'_>,
) -> anyhow::Result<Arc<dyn Dataset + Sync>> {
    let layout = if flags.no_channels_last == Some(true) { Layout::Contiguous } else { Layout::ChannelsLast };
    let directory = || directory(&name.name(), flags.data_dir.as_deref(), "--data-dir");
    let images = Images { name, flags, input, part, layout, purpose };
    if name != DataName::Digits {
        images.check_trained_model()?;
    }
    match name {
        DataName::Digits => images.opened(Digits::for_input(part, input)),
        DataName::Cifar10 => images.data_set(Cifar::open(&directory()?, Edition::Ten, part)),
        DataName::Cifar100 => images.data_set(Cifar::open(&directory()?, Edition::Hundred, part)),
        DataName::Food101 => images.data_set(food101::open(&directory()?, part)),
        DataName::ImageFolder if flags.data_dir.is_none() => {
            Err(usage("--data image-folder: add --data-dir DIR, the directory of the images"))
        }
        DataName::ImageFolder => {
            let files = match (purpose, part) {
                (Purpose::Inference(Some(classes)), Split::Test) => ImageFiles::test_folder(&directory()?, classes),
                _ => ImageFiles::folder(&directory()?, part),
            };
            if let Ok(files) = &files {
                warn_of_skipped(files.skipped());
                warn_of_missing(files);
            }
            images.data_set(files)
        }
        DataName::Synthetic | DataName::Rte | DataName::Cola | DataName::Text | DataName::Tensors => {
            Err(usage(format!("--data {}: this data set has no images", name.name())))
        }
    }
}

/// The directory of a data set: the given one, or the default in the user's data directory.
pub fn directory(name: &str, given: Option<&Path>, flag: &str) -> anyhow::Result<PathBuf> {
    if let Some(given) = given {
        return Ok(given.to_owned());
    }
    let home = user_directory("XDG_DATA_HOME", ".local/share")
        .ok_or_else(|| usage(format!("{flag}: add this flag, because neither XDG_DATA_HOME nor HOME is set")))?;
    Ok(home.join("distgpipe").join(name))
}

/// The number of threads that load batches.
pub fn threads(flags: &TrainFlags) -> anyhow::Result<usize> {
    match flags.loader_threads {
        Some(threads) if (1..=LOADER_THREADS_MAX).contains(&threads) => Ok(threads),
        Some(threads) => Err(usage(format!("--loader-threads {threads}: use 1 to {LOADER_THREADS_MAX}"))),
        None => {
            // Worker 0 runs in this process, which also loads.
            let on_cpu = flags.devices().for_worker(0).resolved() == Device::Cpu;
            let computing = if on_cpu { flags.threads.unwrap_or(1) } else { 0 };
            Ok(cores().saturating_sub(computing).clamp(1, LOADER_THREADS_MAX))
        }
    }
}

fn text(task: Task, flags: &TrainFlags, model: &Model, part: Split) -> anyhow::Result<Arc<dyn Dataset + Sync>> {
    let name = match task {
        Task::Rte => DataName::Rte,
        Task::Cola => DataName::Cola,
    };
    let tokens = tokens(name, flags, model)?;
    let directory = directory(task.name(), flags.data_dir.as_deref(), "--data-dir")?;
    opened(name, Glue::open(&directory, task, part, &tokens))
}

/// The tokenizer of `--tokenizer`, for a model that takes text.
pub fn tokens(name: DataName, flags: &TrainFlags, model: &Model) -> anyhow::Result<Tokens> {
    let Some(length) = token_length(&model.input) else {
        return Err(usage(format!(
            "--data {}: the model does not take text: use --model roberta, or a model with two inputs of integers, token ids and \
             their mask",
            name.name()
        )));
    };
    let Some(path) = &flags.tokenizer else {
        return Err(usage(format!(
            "--data {}: add --tokenizer PATH, RoBERTa's tokenizer.json or the directory with vocab.json and merges.txt that comes \
             with the weights",
            name.name()
        )));
    };
    let tokens = Tokens::open(path, length).map_err(|e| usage(format!("--tokenizer: {e}")))?;
    if let Some(vocabulary) = setting(model, "vocabulary").filter(|&known| known < tokens.vocabulary() as i64) {
        return Err(usage(format!(
            "--tokenizer: it has {0} tokens, and the model has {vocabulary}: use --set vocabulary={0}",
            tokens.vocabulary()
        )));
    }
    Ok(tokens)
}

fn setting(model: &Model, name: &str) -> Option<i64> {
    model.spec.as_ref().and_then(|spec| spec.settings.get(name)?.as_i64())
}

fn synthetic(
    flags: &TrainFlags,
    model: &Model,
    output: &SampleShape,
    part: Split,
) -> anyhow::Result<Arc<dyn Dataset + Sync>> {
    let rows = flags.samples.unwrap_or(SAMPLES);
    let target = match output.dims[..] {
        [classes] => Target::Class(usize::try_from(classes).unwrap_or(0)),
        _ if flags.loss == Some(LossName::BinaryCrossEntropy) => Target::Binary(output.clone()),
        _ => Target::Tensor(output.clone()),
    };
    let options = SyntheticOptions {
        input: model.input.clone(),
        target,
        rows,
        first_row: 0,
        vocabulary: setting(model, "vocabulary").unwrap_or(0),
        pattern: Pattern::Learnable,
        seed: flags.seed.unwrap_or_default(),
    };
    opened(
        DataName::Synthetic,
        Synthetic::new(match part {
            Split::Train => options,
            Split::Test => SyntheticOptions { rows: rows.div_ceil(4), first_row: rows, ..options },
        }),
    )
}

/// The form in which a model takes images.
struct Images<'a> {
    name: DataName,
    flags: &'a TrainFlags,
    input: &'a [SampleShape],
    part: Split,
    layout: Layout,
    purpose: Purpose<'a>,
}

impl Images<'_> {
    fn model_takes_images(&self) -> bool {
        matches!(self.input, [shape] if matches!(shape.dims[..], [3, _, _]))
    }

    /// Whether the images are what a trained model takes. Training rather suggests another model, once it knows the classes.
    fn check_trained_model(&self) -> anyhow::Result<()> {
        match self.purpose {
            Purpose::Inference(_) if !self.model_takes_images() => Err(usage(format!(
                "--data {}: it has images of 3 channels, and the model does not take them: {SUITABLE}",
                self.name.name()
            ))),
            _ => Ok(()),
        }
    }

    fn opened<D: Dataset + Sync + 'static>(
        &self,
        set: Result<D, DataError>,
    ) -> anyhow::Result<Arc<dyn Dataset + Sync>> {
        let failed = |error: DataError| match (self.purpose, &error) {
            (Purpose::Inference(_), DataError::Unsuitable { .. }) => {
                usage(format!("--data {}: {error}; {SUITABLE}", self.name.name()))
            }
            _ => data_error(self.name)(error),
        };
        Ok(Arc::new(set.map_err(failed)?))
    }

    fn data_set<S: ImageSource + 'static>(
        &self,
        source: Result<S, DataError>,
    ) -> anyhow::Result<Arc<dyn Dataset + Sync>> {
        let source = source.map_err(data_error(self.name))?;
        if !self.model_takes_images() {
            return Err(usage(format!(
                "--model: --data {} has images of 3 channels, and the model does not take them: use a model for images, such as \
                 --model mobilenet_v2 --set classes={}",
                self.name.name(),
                source.classes()
            )));
        }
        let set = ImageSet::for_input(source, self.input, self.part, self.layout);
        self.opened(set.and_then(|set| normalised(set, self.flags)))
    }
}

/// Warns of files that are not part of the data set, so that images in other formats are not missed silently.
fn warn_of_skipped(skipped: &Skipped) {
    if let Some(example) = &skipped.example {
        report::note(&format!(
            "warning: --data image-folder: skipped {} such as {}: only .jpg, .jpeg and .png files in class folders are read",
            plural(skipped.count, "file"),
            example.display()
        ));
    }
}

/// Warns of classes without images: the scores say nothing about them.
fn warn_of_missing(files: &ImageFiles) {
    if let Some((folder, missing)) = files.missing_classes() {
        let names: Vec<String> = missing.iter().map(|&name| name.to_owned()).collect();
        report::note(&format!(
            "warning: --data image-folder: {} has no images of {}: {}",
            folder.display(),
            match missing.len() {
                1 => "1 class".to_owned(),
                count => format!("{count} classes"),
            },
            report::listed(&names, report::NAMES_LISTED_MAX)
        ));
    }
}

fn opened<D: Dataset + Sync + 'static>(
    name: DataName,
    set: Result<D, DataError>,
) -> anyhow::Result<Arc<dyn Dataset + Sync>> {
    Ok(Arc::new(set.map_err(data_error(name))?))
}

fn data_error(name: DataName) -> impl Fn(DataError) -> anyhow::Error {
    move |error| {
        let remedy = match error {
            DataError::Unsuitable { .. } => {
                "; change the model with --set (image, channels, input), or use --data tensors or another data set"
            }
            DataError::Failed(Fault::Memory { .. }) => "; --set (image, input, classes) changes the model",
            _ => "",
        };
        usage(format!("--data {}: {error}{remedy}", name.name()))
    }
}

fn limited(data: Arc<dyn Dataset + Sync>, flag: &str, rows: Option<usize>) -> anyhow::Result<Arc<dyn Dataset + Sync>> {
    match rows {
        Some(0) => Err(usage(format!("{flag} 0: use 1 or more rows"))),
        Some(rows) => Ok(Arc::new(Subset::new(data, rows))),
        None => Ok(data),
    }
}
