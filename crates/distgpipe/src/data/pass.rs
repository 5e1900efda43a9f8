//! One pass over the data: the randomness of an epoch, and the threads that load its rows.
//!
//! Threads take the rows of a batch one after the other. The result for a row depends on the seed, the epoch and the row's
//! number, never on the thread, so the batch does not depend on the number of threads.

use super::DataError;
use crate::engine::{self, Layout, Stream};
use crate::failure::Fault;
use crate::sync::lock;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Mutex, PoisonError};
use tch::{Kind, Tensor};

/// The pass over the data that a batch belongs to.
#[derive(Clone, Copy, Debug)]
pub struct LoadPass<'a> {
    stream: Stream,
    threads: usize,
    given_up: &'a AtomicBool,
    /// The number of the CUDA device that the batches are copied to.
    gpu: Option<usize>,
}

impl LoadPass<'static> {
    /// One epoch of a run, loaded by the calling thread alone.
    pub fn new(seed: u64, epoch: u64) -> Self {
        static NEVER: AtomicBool = AtomicBool::new(false);
        LoadPass { stream: Stream::new(seed).named("augmentation").at(epoch), threads: 1, given_up: &NEVER, gpu: None }
    }
}

impl<'a> LoadPass<'a> {
    /// The same pass with several threads, and a flag that cancels the loading.
    pub(super) fn shared(self, threads: usize, given_up: &'a AtomicBool) -> LoadPass<'a> {
        LoadPass { stream: self.stream, threads, given_up, gpu: self.gpu }
    }

    /// The same pass for batches that are copied to this CUDA device.
    pub(super) fn for_gpu(self, gpu: Option<usize>) -> Self {
        LoadPass { gpu, ..self }
    }

    /// A tensor of uninitialized values for the inputs of a batch, in memory from which they are copied fastest to where the batch is
    /// needed.
    ///
    /// # Errors
    /// If there is not enough memory.
    pub fn empty(&self, dims: &[i64], kind: Kind, layout: Layout) -> Result<Tensor, Fault> {
        let device = self.gpu.map_or(tch::Device::Cpu, tch::Device::Cuda);
        engine::empty_near(device, dims, kind, layout)
    }

    /// The random stream of a row in this epoch.
    pub fn row(&self, row: usize) -> Stream {
        self.stream.at(row as u64)
    }

    /// Divides `values` into one slot per row and calls `make` for each row, with its slot and with scratch memory that the
    /// thread reuses.
    ///
    /// # Errors
    /// If `make` fails: the error of the first row that failed. If a thread cannot be started.
    pub fn fill<T: Send, Scratch: Default>(
        &self,
        values: &mut [T],
        rows: &[usize],
        make: impl Fn(usize, &mut [T], &mut Scratch) -> Result<(), DataError> + Sync,
    ) -> Result<(), DataError> {
        let width = values.len().checked_div(rows.len()).unwrap_or(0).max(1);
        let slots = Mutex::new(rows.iter().zip(values.chunks_mut(width)).enumerate());
        let first_error: Mutex<Option<(usize, DataError)>> = Mutex::new(None);
        let work = || {
            let mut scratch = Scratch::default();
            loop {
                if self.given_up.load(Ordering::Relaxed) || lock(&first_error).is_some() {
                    return;
                }
                // Slots are assigned in order, so every row before a failed one is attempted.
                let Some((position, (&row, slot))) = lock(&slots).next() else { return };
                if let Err(error) = make(row, slot, &mut scratch) {
                    let mut first = lock(&first_error);
                    if first.as_ref().is_none_or(|(other, _)| position < *other) {
                        *first = Some((position, error));
                    }
                }
            }
        };
        std::thread::scope(|scope| {
            for _ in 1..self.threads.min(rows.len()) {
                if let Err(error) = engine::spawn_scoped(scope, "loader of rows", work) {
                    // Keeps the threads that have started from loading the rest.
                    *lock(&first_error) = Some((0, Fault::from(error).into()));
                    break;
                }
            }
            work();
        });
        match first_error.into_inner().unwrap_or_else(PoisonError::into_inner) {
            Some((_, error)) => Err(error),
            None if self.given_up.load(Ordering::Relaxed) => Err(DataError::Cancelled),
            None => Ok(()),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_slot_is_its_rows_whatever_the_threads_and_the_first_error_is_told() {
        let rows: Vec<usize> = (0..97).rev().collect();
        let expected: Vec<u64> = rows.iter().flat_map(|&r| [r as u64, LoadPass::new(1, 2).row(r).seed()]).collect();
        assert_ne!(LoadPass::new(1, 2).row(0), LoadPass::new(1, 2).row(1));
        let never = AtomicBool::new(false);
        for threads in [1, 2, 7, 200] {
            let pass = LoadPass::new(1, 2).shared(threads, &never);
            let mut values = vec![0; 2 * rows.len()];
            pass.fill(&mut values, &rows, |row, slot, ()| {
                slot.copy_from_slice(&[row as u64, pass.row(row).seed()]);
                Ok(())
            })
            .unwrap();
            assert_eq!(values, expected, "{threads} threads");
            let error = pass.fill(&mut values, &rows, |row, _, ()| match row {
                5 | 40 | 41 => Err(DataError::NoSuchRow { len: 0, got: row }),
                _ => Ok(()),
            });
            assert!(matches!(error, Err(DataError::NoSuchRow { got: 41, .. })), "{threads} threads: {error:?}");
        }
        // Two rows fail at the same time: the first row's error is returned, whichever thread reports first.
        let together = std::sync::Barrier::new(2);
        for _ in 0..100 {
            let error = LoadPass::new(1, 2).shared(2, &never).fill(&mut [(); 2], &[41, 40], |row, _, ()| {
                together.wait();
                Err(DataError::NoSuchRow { len: 0, got: row })
            });
            assert!(matches!(error, Err(DataError::NoSuchRow { got: 41, .. })), "{error:?}");
        }
        assert!(LoadPass::new(0, 0).fill(&mut [0u8; 0], &[], |_, _, ()| Ok(())).is_ok());
    }

    #[test]
    fn a_batch_that_nobody_wants_is_not_finished() {
        let given_up = AtomicBool::new(false);
        let pass = LoadPass::new(0, 0).shared(1, &given_up);
        let mut values = [0u8; 10];
        let error = pass.fill(&mut values, &(0..10).collect::<Vec<_>>(), |row, slot, ()| {
            slot[0] = 1;
            given_up.store(row == 3, Ordering::Relaxed);
            Ok(())
        });
        assert!(matches!(error, Err(DataError::Cancelled)));
        assert_eq!(values.iter().sum::<u8>(), 4);
    }
}
