//! What most programs need, in one import: `use distgpipe::prelude::*;`.

pub use crate::data::{DataError, Dataset, Digits, LoadPass, Loader, LoaderOptions, Split, TensorDataset};
pub use crate::zoo::Mlp;
pub use crate::{
    Batch, Builder, Checkpoints, CodecPolicy, CodecSpec, Context, Device, Event, Failure, Fault, Init, Layer,
    LayerTensors, Loss, LossFunction, Model, ModelSpec, Optim, ParameterGroup, ParameterState, Pipeline, Plan,
    Recompute, RunControl, RunSummary, SampleShape, SaveEvery, Schedule, ShapeError, SkipShapes, Slot, TensorSpec,
    TestMetric, TrainOptions, Trainer, UpdateRule, WorkerProgram, Workers,
};
