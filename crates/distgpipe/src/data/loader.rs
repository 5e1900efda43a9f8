//! The loader: decides which rows make which batch, and loads batches ahead of time on background threads.
//!
//! The order of an epoch and the augmentation of its rows depend on the seed and the epoch's number alone: not on the
//! workers, the schedule, the number of loading threads, or earlier calls. An epoch can therefore start at any batch.
//!
//! ```text
//! loading threads  [batch 0][batch 1][batch 2]  full  [batch 3]      all threads work on one batch
//! queue of 2               0        0 1      1 2     2 3
//! trainer                  [ step 0         ][ step 1 ]
//! ```
//!
//! For a pipeline on a GPU, batches are loaded into pinned memory, and the copy of the next batch to the GPU starts when the trainer
//! takes one. So the GPU holds one batch more than it computes on, and never waits for a copy if the loading keeps up. Images that the data
//! set has as bytes are copied as bytes, and the GPU resizes and normalises them.
//!
//! ```text
//! copies       [batch 1       ] [batch 2       ]
//! GPU          [ step 0         ][ step 1         ]
//! ```

use super::image::ImageBytes;
use super::{DataError, Dataset, LoadPass};
use crate::driver::pipeline::{Batch, Pipeline};
use crate::engine::{self, kernels, Stream, Uploading, Uploads};
use crate::failure::Fault;
use crate::model::layer::SampleShape;
use crate::sync::lock;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::{sync_channel, Receiver};
use std::sync::{Arc, Mutex};
use std::thread::JoinHandle;

/// How many loaded batches are queued for the trainer.
const AHEAD: usize = 2;

/// The order of the rows.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Order {
    /// A new random order each epoch.
    Shuffled,
    /// The order of the data set.
    Given,
}

/// What happens to rows that do not fill a batch.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum LastBatch {
    /// They are skipped in this epoch.
    Drop,
    /// They form a smaller batch.
    Keep,
}

/// Options of a [`Loader`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct LoaderOptions {
    /// The number of rows in a batch.
    pub batch_rows: usize,
    /// The order of the rows.
    pub order: Order,
    /// What happens to rows that do not fill a batch.
    pub last: LastBatch,
    /// The seed of the order and of augmentation.
    pub seed: u64,
    /// How many threads load the rows of a batch.
    pub threads: usize,
}

impl LoaderOptions {
    /// Options for training: shuffled with this seed, full batches only, one loading thread.
    pub fn training(batch_rows: usize, seed: u64) -> Self {
        LoaderOptions { batch_rows, order: Order::Shuffled, last: LastBatch::Drop, seed, threads: 1 }
    }

    /// Options for testing: every row once, in the order of the data set, one loading thread.
    pub fn testing(batch_rows: usize) -> Self {
        LoaderOptions { batch_rows, order: Order::Given, last: LastBatch::Keep, seed: 0, threads: 1 }
    }
}

/// Makes batches from a data set.
#[derive(Clone)]
pub struct Loader {
    /// One batch is loaded at a time, so that a data set need not be `Sync`. The threads of a [`LoadPass`] share the batch.
    data: Arc<Mutex<dyn Dataset>>,
    /// The size of the data set, its classes and its input, which can be asked for while a batch is being loaded.
    data_rows: usize,
    classes: Option<usize>,
    class_names: Option<Vec<String>>,
    input: Vec<SampleShape>,
    options: LoaderOptions,
}

impl Loader {
    /// A loader for a data set. For two loaders of one data set, give each a clone of an `Arc` of it.
    ///
    /// # Errors
    /// If an epoch would have no batch, or if the order of its rows does not fit in memory.
    pub fn new(data: impl Dataset + 'static, options: LoaderOptions) -> Result<Self, DataError> {
        let (rows, batch) = (data.len(), options.batch_rows);
        if batch == 0 || rows == 0 || (batch > rows && options.last == LastBatch::Drop) {
            return Err(DataError::BatchSize { rows, batch });
        }
        let (classes, class_names, input) = (data.classes(), data.class_names(), data.input().to_vec());
        // The order, and the rows of each batch.
        let order_bytes = 2 * size_of::<usize>() as u128 * rows as u128;
        engine::require_memory(&format!("the order of {rows} rows"), order_bytes, "use fewer rows")?;
        Ok(Loader { data: Arc::new(Mutex::new(data)), data_rows: rows, classes, class_names, input, options })
    }

    /// The number of rows in the data set.
    pub fn data_rows(&self) -> usize {
        self.data_rows
    }

    /// The number of classes in the data set; `None` if targets are not class numbers.
    pub fn classes(&self) -> Option<usize> {
        self.classes
    }

    /// The names of the classes, by class number; `None` if there are none.
    pub fn class_names(&self) -> Option<Vec<String>> {
        self.class_names.clone()
    }

    /// The shapes of one row's input tensors.
    pub fn input(&self) -> &[SampleShape] {
        &self.input
    }

    /// The first rows of the data set, at most so many, as they are in epoch 0: a sample for
    /// [`Builder::auto_balance`](crate::Builder::auto_balance).
    ///
    /// # Errors
    /// If a row cannot be loaded.
    pub fn sample(&self, rows: usize) -> Result<Batch, DataError> {
        let rows: Vec<usize> = (0..rows.min(self.data_rows)).collect();
        load(&self.data, &rows, LoadPass::new(self.options.seed, 0))
    }

    /// The number of batches in an epoch.
    pub fn batches(&self) -> usize {
        match self.options.last {
            LastBatch::Drop => self.data_rows / self.options.batch_rows,
            LastBatch::Keep => self.data_rows.div_ceil(self.options.batch_rows),
        }
    }

    /// The number of rows in the smallest batch of an epoch.
    pub fn rows_min(&self) -> usize {
        match self.options.last {
            LastBatch::Keep if !self.data_rows.is_multiple_of(self.options.batch_rows) => {
                self.data_rows % self.options.batch_rows
            }
            _ => self.options.batch_rows,
        }
    }

    /// The rows of each batch of an epoch.
    pub fn rows(&self, epoch: u64) -> Vec<Vec<usize>> {
        let mut rows: Vec<usize> = (0..self.data_rows).collect();
        if self.options.order == Order::Shuffled {
            Stream::new(self.options.seed).named("order of rows").at(epoch).shuffle(&mut rows);
        }
        rows.chunks(self.options.batch_rows).take(self.batches()).map(<[usize]>::to_vec).collect()
    }

    /// Starts loading an epoch. Dropping the returned iterator stops the loading.
    pub fn epoch(&self, epoch: u64) -> Epoch {
        self.epoch_from(epoch, 0)
    }

    /// Starts loading an epoch at one of its batches. The batches are those that [`epoch`](Self::epoch) would return from
    /// there on.
    pub fn epoch_from(&self, epoch: u64, batch: usize) -> Epoch {
        self.epoch_on(BatchDevices::default(), epoch, batch)
    }

    /// The same for this pipeline: if its workers are threads that use a GPU, each batch is copied there while the step before runs.
    pub fn epoch_for(&self, pipeline: &Pipeline, epoch: u64, batch: usize) -> Epoch {
        self.epoch_on(pipeline.batch_devices(), epoch, batch)
    }

    fn epoch_on(&self, devices: BatchDevices, epoch: u64, batch: usize) -> Epoch {
        if let Err(error) = self.require_batch_memory() {
            return Epoch::failed(error);
        }
        let prefetch = match Prefetch::new(devices) {
            Ok(prefetch) => prefetch,
            Err(fault) => return Epoch::failed(fault.into()),
        };
        let mut plan = self.rows(epoch);
        plan.drain(..batch.min(plan.len()));
        let left = plan.len();
        let data = self.data.clone();
        let options = self.options;
        let given_up = Arc::new(AtomicBool::new(false));
        let told = given_up.clone();
        let (send, receive) = sync_channel(AHEAD);
        let thread = engine::spawn("loader", move || {
            engine::attach_thread(1, 0);
            let pass = LoadPass::new(options.seed, epoch).shared(options.threads, &told).for_gpu(devices.inputs);
            let attached = devices.any().map_or(Ok(()), engine::attach_to_gpu);
            let mut bytes_for = devices.inputs;
            for rows in plan {
                let batch = match &attached {
                    Ok(()) => load_for(devices, &mut bytes_for, &data, (&rows, pass)),
                    Err(fault) => Err(Fault::engine(fault.to_string()).into()),
                };
                // The receiver is gone: the epoch was dropped.
                if send.send(batch).is_err() {
                    return;
                }
            }
        });
        let (thread, failed) = match thread {
            Ok(thread) => (Some(thread), None),
            Err(error) => (None, Some(DataError::Failed(error.into()))),
        };
        Epoch { receive: Some(receive), thread, failed, given_up, left, prefetch }
    }

    /// Checks that a batch fits in memory, before the first one is loaded.
    fn require_batch_memory(&self) -> Result<(), DataError> {
        let rows = self.options.batch_rows.min(self.data_rows);
        let remedy = "use a smaller batch (`LoaderOptions::batch_rows`), or a model with a smaller input";
        let bytes = row_bytes(&self.input).saturating_mul(rows as u128);
        Ok(engine::require_memory(&format!("a batch of {rows} rows"), bytes, remedy)?)
    }
}

/// The bytes of one row's input tensors.
fn row_bytes(input: &[SampleShape]) -> u128 {
    let bytes = |shape: &SampleShape| {
        let elements = shape.dims.iter().map(|&dim| u128::try_from(dim).unwrap_or(0));
        elements.fold(shape.kind.elt_size_in_bytes() as u128, u128::saturating_mul)
    };
    input.iter().map(bytes).sum()
}

/// Loads a batch. The lock is held for this batch alone, so an epoch that waits for its trainer blocks no other epoch.
fn load(data: &Mutex<dyn Dataset>, rows: &[usize], pass: LoadPass<'_>) -> Result<Batch, DataError> {
    // A data set that panicked in an earlier epoch gets its next chance: loading does not change it.
    Ok(Batch { samples: samples(rows), ..lock(data).batch(rows, pass)? })
}

/// The samples' numbers.
fn samples(rows: &[usize]) -> Vec<u64> {
    rows.iter().map(|&row| row as u64).collect()
}

/// Loads a batch for GPUs: as bytes for the one in `bytes_for`, which becomes `None` if the data set has no bytes or the GPU cannot use
/// them.
fn load_for(
    devices: BatchDevices,
    bytes_for: &mut Option<usize>,
    data: &Mutex<dyn Dataset>,
    (rows, pass): (&[usize], LoadPass<'_>),
) -> Result<Loaded, DataError> {
    if let Some(device) = *bytes_for {
        let images = lock(data).image_bytes(rows, pass)?;
        if let Some(images) = images.filter(|_| kernels::can_resize_images(device)) {
            let target = images.target().shallow_clone();
            let without_inputs = Batch { inputs: Vec::new(), target, samples: samples(rows) };
            return Ok(Loaded::Bytes(devices.pinned(without_inputs)?, images));
        }
        *bytes_for = None;
    }
    Ok(Loaded::Batch(devices.pinned(load(data, rows, pass)?)?))
}

/// A batch on its way from the loading thread.
enum Loaded {
    Batch(Batch),
    /// Without its inputs, which the GPU makes from the bytes.
    Bytes(Batch, ImageBytes),
}

/// An iterator over the batches of an epoch, which are loaded ahead of time.
pub struct Epoch {
    receive: Option<Receiver<Result<Loaded, DataError>>>,
    thread: Option<JoinHandle<()>>,
    /// Why there is no thread; the first item.
    failed: Option<DataError>,
    given_up: Arc<AtomicBool>,
    left: usize,
    /// Absent if the batches stay on the host.
    prefetch: Option<Prefetch>,
}

/// The CUDA devices on which the workers of this process need the inputs and the targets of a batch, by number. `None` leaves them on
/// the host.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct BatchDevices {
    pub inputs: Option<usize>,
    pub target: Option<usize>,
}

impl BatchDevices {
    fn any(self) -> Option<usize> {
        self.inputs.or(self.target)
    }

    /// The batch in pinned memory, as far as it is copied to a GPU.
    fn pinned(self, mut batch: Batch) -> Result<Batch, Fault> {
        if let Some(device) = self.inputs {
            batch.inputs =
                batch.inputs.iter().map(|input| engine::in_pinned_memory(input, device)).collect::<Result<_, _>>()?;
        }
        if let Some(device) = self.target {
            batch.target = engine::in_pinned_memory(&batch.target, device)?;
        }
        Ok(batch)
    }
}

/// Copies each batch to the GPU while the batch before it is used.
struct Prefetch {
    inputs: Option<Uploads>,
    target: Option<Uploads>,
    /// The next batch, on its way.
    next: Option<Result<CopiedBatch, DataError>>,
}

/// A batch on its way to the GPU.
struct CopiedBatch {
    batch: Batch,
    inputs: Option<Uploading>,
    target: Option<Uploading>,
}

impl Prefetch {
    /// `None` if nothing is copied.
    fn new(devices: BatchDevices) -> Result<Option<Self>, Fault> {
        if devices.any().is_none() {
            return Ok(None);
        }
        let inputs = devices.inputs.map(Uploads::new).transpose()?;
        let target = devices.target.map(Uploads::new).transpose()?;
        Ok(Some(Prefetch { inputs, target, next: None }))
    }

    fn start(&self, loaded: Loaded) -> Result<CopiedBatch, DataError> {
        let start = |uploads: &Uploads| match &loaded {
            Loaded::Batch(batch) => uploads.start(&batch.inputs.iter().collect::<Vec<_>>()),
            Loaded::Bytes(_, images) => uploads
                .start_and(&[images.bytes()], |copies| copies.iter().map(|bytes| images.resized(bytes)).collect()),
        };
        let inputs = self.inputs.as_ref().map(start);
        let (Loaded::Batch(batch) | Loaded::Bytes(batch, _)) = loaded;
        let target = self.target.as_ref().map(|uploads| uploads.start(&[&batch.target]));
        let (inputs, target) = (inputs.transpose()?, target.transpose()?);
        Ok(CopiedBatch { batch, inputs, target })
    }

    /// Takes a batch, and starts to copy the one after it if that is loaded.
    fn take(&mut self, from: &Receiver<Result<Loaded, DataError>>, left: usize) -> Result<Batch, DataError> {
        let current = match self.next.take() {
            Some(copied) => copied,
            None => from.recv().unwrap_or(Err(DataError::LoaderPanicked)).and_then(|loaded| self.start(loaded)),
        }?;
        if left > 0 {
            self.next = from.try_recv().ok().map(|loaded| loaded.and_then(|loaded| self.start(loaded)));
        }
        let CopiedBatch { mut batch, inputs, target } = current;
        if let Some(inputs) = inputs {
            batch.inputs = inputs.finish()?;
        }
        if let Some(target) = target.map(Uploading::finish).transpose()?.and_then(|mut tensors| tensors.pop()) {
            batch.target = target;
        }
        Ok(batch)
    }
}

impl Epoch {
    /// An epoch whose only item is an error.
    fn failed(error: DataError) -> Self {
        Epoch { receive: None, thread: None, failed: Some(error), given_up: Arc::default(), left: 1, prefetch: None }
    }
}

impl Iterator for Epoch {
    type Item = Result<Batch, DataError>;

    fn next(&mut self) -> Option<Self::Item> {
        self.left = self.left.checked_sub(1)?;
        if let Some(error) = self.failed.take() {
            self.left = 0;
            return Some(Err(error));
        }
        let receive = self.receive.as_ref()?;
        let batch = match &mut self.prefetch {
            Some(prefetch) => prefetch.take(receive, self.left),
            None => receive.recv().unwrap_or(Err(DataError::LoaderPanicked)).and_then(|loaded| match loaded {
                Loaded::Batch(batch) => Ok(batch),
                Loaded::Bytes(..) => Err(Fault::internal("a batch for the host", "one for a GPU").into()),
            }),
        };
        if batch.is_err() {
            self.left = 0;
        }
        Some(batch)
    }
}

impl Drop for Epoch {
    fn drop(&mut self) {
        self.given_up.store(true, Ordering::Relaxed);
        // Drops the receiver first, which wakes a thread that waits for space in the queue.
        drop(self.receive.take());
        if let Some(thread) = self.thread.take() {
            // A panic has been reported as `LoaderPanicked`.
            let _ = thread.join();
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::data::image::{Image, ImageSource};
    use crate::data::{ImageOptions, ImageSet, Split};
    use tch::Tensor;

    /// Row i holds the number i. Row 13 can be made to panic.
    struct Numbers {
        len: usize,
        unlucky: bool,
        input: Vec<SampleShape>,
    }

    fn numbers(len: usize, unlucky: bool) -> Numbers {
        Numbers { len, unlucky, input: vec![SampleShape::float(&[1])] }
    }

    impl Dataset for Numbers {
        fn len(&self) -> usize {
            self.len
        }
        fn classes(&self) -> Option<usize> {
            None
        }
        fn input(&self) -> &[SampleShape] {
            &self.input
        }
        fn batch(&self, rows: &[usize], _: LoadPass<'_>) -> Result<Batch, DataError> {
            assert!(!(self.unlucky && rows.contains(&13)), "row 13");
            let values: Vec<f32> = rows.iter().map(|&r| r as f32).collect();
            Ok(Batch::new(Tensor::from_slice(&values).view([-1, 1]), Tensor::from_slice(&values)))
        }
    }

    /// On the CPU, and on a GPU where there is one.
    #[test]
    fn the_batches_for_a_pipeline_are_those_of_the_epoch_on_its_device() {
        use crate::engine::Device;
        use crate::model::zoo::Mlp;
        let loader = Loader::new(numbers(40, false), LoaderOptions::training(7, 3)).unwrap();
        let expected: Vec<Batch> = loader.epoch_from(2, 1).collect::<Result<_, _>>().unwrap();
        for device in [Device::Cpu, Device::Cuda(0)] {
            let Ok(opened) = device.open() else { continue };
            let build = |place: &str| {
                let builder = Pipeline::builder(Mlp::default().model().unwrap()).threads(1).micro_batches(2);
                builder.device(device).place(place).build().unwrap()
            };
            for pipeline in [build("a"), build("a,b,a"), build("a,b")] {
                let got: Vec<Batch> = loader.epoch_for(&pipeline, 2, 1).collect::<Result<_, _>>().unwrap();
                assert_eq!(got.len(), expected.len());
                for (got, expected) in got.iter().zip(&expected) {
                    assert_eq!((got.inputs[0].device(), got.target.device()), (opened, opened));
                    assert_eq!(got.inputs[0].to_device(tch::Device::Cpu), expected.inputs[0]);
                    assert_eq!(got.target.to_device(tch::Device::Cpu), expected.target);
                    assert_eq!(got.samples, expected.samples);
                }
            }
        }
        // An error arrives in its place, also through the prefetch.
        let unlucky = Loader::new(numbers(40, true), LoaderOptions::testing(10)).unwrap();
        let pipeline = Pipeline::builder(Mlp::default().model().unwrap()).build().unwrap();
        let outcomes: Vec<bool> = unlucky.epoch_for(&pipeline, 0, 0).map(|batch| batch.is_ok()).collect();
        assert_eq!(outcomes, [true, false]);
    }

    /// Small images in memory, which go to a GPU as bytes.
    struct Small;

    impl ImageSource for Small {
        fn name(&self) -> &'static str {
            "small"
        }
        fn len(&self) -> usize {
            40
        }
        fn classes(&self) -> usize {
            10
        }
        fn size(&self) -> Option<[u32; 2]> {
            Some([12, 8])
        }
        fn label(&self, row: usize) -> i64 {
            row as i64 % 10
        }
        fn image<'a>(&'a self, row: usize, memory: &'a mut Vec<u8>) -> Result<Image<'a>, DataError> {
            *memory = (0..3 * 12 * 8).map(|at| (at * 89 + row * 31) as u8).collect();
            Ok(Image { width: 12, height: 8, pixels: memory })
        }
    }

    /// Bit for bit. Needs a GPU, and DISTGPIPE_GPU_TESTS=1 to say that there is one.
    #[test]
    fn images_for_a_gpu_are_those_of_the_cpu() {
        use crate::engine::{Device, Layout};
        use crate::model::zoo::MobileNetV2;
        if std::env::var_os("DISTGPIPE_GPU_TESTS").is_none() {
            eprintln!("NOT TESTED: set DISTGPIPE_GPU_TESTS=1 on a machine with a GPU");
            return;
        }
        let opened = Device::Cuda(0).open().unwrap();
        assert!(kernels::can_resize_images(0));
        for (split, layout) in [(Split::Train, Layout::ChannelsLast), (Split::Test, Layout::Contiguous)] {
            let images = ImageSet::new(Small, ImageOptions { side: 32, split, layout }).unwrap();
            let loader = Loader::new(images, LoaderOptions { threads: 3, ..LoaderOptions::training(7, 3) }).unwrap();
            let model = MobileNetV2 { image: 32, ..MobileNetV2::default() }.model().unwrap();
            let pipeline = Pipeline::builder(model).device(Device::Cuda(0)).build().unwrap();
            let expected: Vec<Batch> = loader.epoch(1).collect::<Result<_, _>>().unwrap();
            let got: Vec<Batch> = loader.epoch_for(&pipeline, 1, 0).collect::<Result<_, _>>().unwrap();
            assert_eq!((got.len(), expected.len()), (5, 5));
            for (got, expected) in got.iter().zip(&expected) {
                assert_eq!((got.inputs[0].device(), engine::layout(&got.inputs[0])), (opened, Some(layout)));
                assert_eq!(got.inputs[0].to_device(tch::Device::Cpu), expected.inputs[0]);
                assert_eq!(got.target.to_device(tch::Device::Cpu), expected.target);
                assert_eq!(got.samples, expected.samples);
            }
        }
    }

    /// 16 TB of row numbers were allocated, which ended the process.
    #[test]
    fn more_rows_than_memory_can_order_are_refused_before_anything_is_allocated() {
        let many = Loader::new(numbers(1_000_000_000_000, false), LoaderOptions::testing(1)).err().unwrap().to_string();
        assert!(many.contains("the order of 1000000000000 rows takes 16.0 TB of memory, and this host has"), "{many}");
        assert!(many.ends_with("use fewer rows"), "{many}");
        let wide = Numbers { len: 1000, unlucky: false, input: vec![SampleShape::float(&[1 << 20, 1 << 20])] };
        let wide = Loader::new(Arc::new(wide), LoaderOptions::training(10, 0)).unwrap();
        let items: Vec<String> = wide.epoch(0).map(|batch| batch.err().unwrap().to_string()).collect();
        assert_eq!(items.len(), 1);
        assert!(items[0].contains("a batch of 10 rows takes 44.0 TB of memory, and this host has"), "{items:?}");
    }

    fn options(batch_rows: usize, last: LastBatch) -> LoaderOptions {
        LoaderOptions { batch_rows, order: Order::Shuffled, last, seed: 3, threads: 1 }
    }

    #[test]
    fn the_order_depends_on_seed_and_epoch_alone() {
        let loader =
            |seed| Loader::new(numbers(20, false), LoaderOptions { seed, ..options(6, LastBatch::Drop) }).unwrap();
        let a = loader(3);
        let asked_before = (a.rows(1), a.rows(0));
        assert_eq!((a.rows(0), a.rows(1)), (asked_before.1.clone(), asked_before.0));
        assert_eq!(loader(3).rows(0), asked_before.1);
        assert_ne!(a.rows(0), a.rows(1));
        assert_ne!(a.rows(0), loader(4).rows(0));
        let loaded: Vec<Vec<f32>> = a.epoch(0).map(|b| Vec::try_from(&b.unwrap().target).unwrap()).collect();
        let planned: Vec<Vec<f32>> = a.rows(0).iter().map(|b| b.iter().map(|&r| r as f32).collect()).collect();
        assert_eq!(loaded, planned);
        let resumed: Vec<Vec<f32>> = a.epoch_from(0, 2).map(|b| Vec::try_from(&b.unwrap().target).unwrap()).collect();
        assert_eq!(resumed, planned[2..]);
        assert!(a.epoch_from(0, 4).next().is_none());
    }

    #[test]
    fn every_row_comes_once_unless_the_last_batch_is_dropped() {
        for (last, batches, rows_min, rows) in [(LastBatch::Drop, 3, 6, 18), (LastBatch::Keep, 4, 2, 20)] {
            let loader = Loader::new(numbers(20, false), options(6, last)).unwrap();
            assert_eq!((loader.batches(), loader.rows_min()), (batches, rows_min));
            let mut all: Vec<usize> = loader.rows(5).concat();
            assert_eq!(all.len(), rows);
            all.sort_unstable();
            all.dedup();
            assert_eq!(all.len(), rows);
        }
        let given = LoaderOptions { order: Order::Given, ..options(8, LastBatch::Keep) };
        assert_eq!(Loader::new(numbers(20, false), given).unwrap().rows(9).concat(), (0..20).collect::<Vec<_>>());
    }

    #[test]
    fn batches_that_cannot_be_are_refused() {
        for (rows, batch, last) in [(20, 0, LastBatch::Keep), (20, 21, LastBatch::Drop), (0, 1, LastBatch::Keep)] {
            let error = Loader::new(numbers(rows, false), options(batch, last)).err().unwrap();
            assert!(matches!(error, DataError::BatchSize { .. }), "{error}");
        }
        assert!(Loader::new(numbers(20, false), options(21, LastBatch::Keep)).is_ok());
    }

    /// Under a limit on processes, `std::thread::spawn` panics.
    #[test]
    fn a_thread_that_cannot_be_started_is_an_error_that_names_the_limit() {
        let loader = Loader::new(numbers(20, false), options(6, LastBatch::Drop)).unwrap();
        let mut epoch = engine::refusal::with_refused("loader", || loader.epoch(0));
        let error = epoch.next().unwrap().err().unwrap().to_string();
        assert!(error.contains("cannot start the thread `loader`") && error.contains("`ulimit -u`"), "{error}");
        assert!(epoch.next().is_none());
        let never = AtomicBool::new(false);
        let pass = LoadPass::new(0, 0).shared(4, &never);
        let filled = engine::refusal::with_refused("loader of rows", || {
            pass.fill(&mut [0; 20], &(0..20).collect::<Vec<_>>(), |_, _, ()| Ok(()))
        });
        let error = filled.unwrap_err().to_string();
        assert!(error.contains("cannot start the thread `loader of rows`"), "{error}");
    }

    #[test]
    fn an_epoch_given_up_ends_its_thread_and_a_panic_is_told() {
        let loader = Loader::new(numbers(1000, false), options(1, LastBatch::Drop)).unwrap();
        let mut epoch = loader.epoch(0);
        assert!(epoch.next().unwrap().is_ok());
        // Joins the thread, which hangs if the thread waits for space in the queue forever.
        drop(epoch);
        let unlucky = Loader::new(numbers(20, true), options(20, LastBatch::Drop)).unwrap();
        let mut epoch = unlucky.epoch(0);
        assert!(matches!(epoch.next(), Some(Err(DataError::LoaderPanicked))));
        assert!(epoch.next().is_none());
    }

    /// The lock of a data set must not be held by an epoch whose queue is full: the other epoch would wait forever.
    #[test]
    fn two_epochs_of_one_loader_run_side_by_side() {
        let loader = Loader::new(numbers(1000, false), options(1, LastBatch::Drop)).unwrap();
        let (mut waiting, other) = (loader.epoch(0), loader.epoch(1));
        assert_eq!(other.map(|batch| batch.unwrap().rows()).sum::<usize>(), 1000);
        assert_eq!(loader.sample(3).unwrap().samples, [0, 1, 2]);
        assert!(waiting.next().unwrap().is_ok());
    }
}
