//! Random numbers in CUDA graphs.
//!
//! A graph is recorded once and run with other random numbers in every step. So what it records is not the seed of a draw but a place
//! in a table of seeds on the device, and the table is filled before each run. The [`Context`](crate::Context) of a pass tells how a
//! stream follows from that of the step and micro-batch; a stream of any other origin cannot be recorded.

use super::{cuda, empty_near, Layout, Stream};
use crate::failure::Fault;
use std::cell::RefCell;
use std::collections::HashMap;
use tch::{Kind, Tensor};

/// The most draws that one pass may make.
const DRAWS_MAX: usize = 1024;

/// How the stream of a draw follows from that of the step and micro-batch.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum DrawSite {
    /// The nth stream of a layer.
    Layer {
        /// The layer's number in the model.
        layer: u64,
        /// The number of the stream, from 1.
        draw: u64,
    },
    /// A place that does not depend on how the model is divided into layers.
    Place(u64),
}

impl DrawSite {
    /// The stream of the draw in a pass with this stream.
    pub fn stream(self, pass: Stream) -> Stream {
        match self {
            DrawSite::Layer { layer, draw } => pass.at(layer).at(draw),
            DrawSite::Place(place) => pass.named("place").at(place),
        }
    }
}

/// The seeds of a recorded pass.
pub struct SeedTable {
    sites: Vec<DrawSite>,
    seeds: Tensor,
    /// In pinned memory, for the copy to the device.
    host: Tensor,
}

impl SeedTable {
    /// An empty table on a device.
    pub fn new(device: tch::Device) -> Result<Self, Fault> {
        let seeds = Tensor::f_zeros([DRAWS_MAX as i64], (Kind::Int64, device))?;
        let host = empty_near(device, &[DRAWS_MAX as i64], Kind::Int64, Layout::Contiguous)?;
        Ok(SeedTable { sites: Vec::new(), seeds, host })
    }

    /// Runs `body`, whose draws take their seeds from this table. Fails if it draws anything else.
    pub fn record<T>(&mut self, body: impl FnOnce() -> Result<T, Fault>) -> Result<T, Fault> {
        let recorder = Recorder {
            named: HashMap::new(),
            sites: std::mem::take(&mut self.sites),
            seeds: self.seeds.shallow_clone(),
            refused: None,
        };
        RECORDER.with_borrow_mut(|current| *current = Some(recorder));
        let _end = EndOfRecording;
        let made = body();
        let recorder = RECORDER.take().ok_or_else(|| Fault::internal("a recorder of draws", "none"))?;
        self.sites = recorder.sites;
        match recorder.refused {
            Some(what) => Err(refusal(what)),
            None => made,
        }
    }

    /// Fills the table for a run of the pass with this stream. The step must end before the table is filled again.
    pub fn fill(&mut self, pass: Stream) -> Result<(), Fault> {
        let count = self.sites.len();
        if count == 0 {
            return Ok(());
        }
        let seeds: Vec<i64> = self.sites.iter().map(|site| site.stream(pass).0 as i64).collect();
        let mut host = self.host.f_narrow(0, 0, count as i64)?;
        host.f_copy_(&Tensor::f_from_slice(&seeds)?)?;
        cuda::copy(&self.seeds.f_narrow(0, 0, count as i64)?, &host)
    }
}

struct EndOfRecording;

impl Drop for EndOfRecording {
    fn drop(&mut self) {
        RECORDER.take();
    }
}

struct Recorder {
    /// How the streams that the pass has taken so far follow from its own, by seed.
    named: HashMap<u64, DrawSite>,
    sites: Vec<DrawSite>,
    seeds: Tensor,
    /// What was drawn that cannot be recorded.
    refused: Option<&'static str>,
}

thread_local! {
    static RECORDER: RefCell<Option<Recorder>> = const { RefCell::new(None) };
}

/// Tells how a stream follows from that of the pass.
pub(crate) fn name(stream: Stream, site: DrawSite) -> Stream {
    RECORDER.with_borrow_mut(|current| {
        if let Some(recorder) = current {
            recorder.named.insert(stream.0, site);
        }
    });
    stream
}

/// Where a recorded draw finds its seed; `None` if nothing is recorded.
pub(super) fn seed_of(stream: Stream) -> Option<Result<Tensor, Fault>> {
    RECORDER.with_borrow_mut(|current| {
        current.as_mut().map(|recorder| {
            let site =
                *recorder.named.get(&stream.0).ok_or_else(|| refusal("a stream that is not the context's own"))?;
            let known = recorder.sites.iter().position(|known| *known == site);
            let slot = known.unwrap_or(recorder.sites.len());
            if known.is_none() {
                if slot == DRAWS_MAX {
                    return Err(refusal("more than 1024 masks in one pass"));
                }
                recorder.sites.push(site);
            }
            Ok(recorder.seeds.f_narrow(0, slot as i64, 1)?)
        })
    })
}

/// Notes that the pass draws numbers that a graph would repeat.
pub(super) fn refuse(what: &'static str) {
    RECORDER.with_borrow_mut(|current| {
        if let Some(recorder) = current {
            recorder.refused.get_or_insert(what);
        }
    });
}

fn refusal(what: &str) -> Fault {
    Fault::engine(format!("a CUDA graph cannot draw new random numbers for {what}"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_recorded_draw_is_named_by_its_place_and_filled_for_each_step() {
        let mut table = SeedTable::new(tch::Device::Cpu).unwrap();
        let (first, later) = (Stream::new(1).at(0), Stream::new(1).at(1));
        let layer = DrawSite::Layer { layer: 3, draw: 1 };
        let slots = |table: &mut SeedTable| {
            table.record(|| {
                let streams = [layer, DrawSite::Place(7)].map(|site| name(site.stream(first), site));
                streams.iter().map(|stream| seed_of(*stream).unwrap()).collect::<Result<Vec<_>, _>>()
            })
        };
        let seeds = slots(&mut table).unwrap();
        for pass in [first, later] {
            table.fill(pass).unwrap();
            for (seed, expected) in seeds.iter().zip([pass.at(3).at(1), pass.named("place").at(7)]) {
                assert_eq!(seed.int64_value(&[0]) as u64, expected.seed());
            }
        }
        // A recomputation finds the same seeds.
        assert_eq!(slots(&mut table).unwrap(), seeds);
        assert_eq!(table.sites.len(), 2);
    }

    #[test]
    fn what_a_graph_would_repeat_is_refused() {
        let mut table = SeedTable::new(tch::Device::Cpu).unwrap();
        let own = table.record(|| seed_of(Stream::new(2)).unwrap().map(drop));
        assert!(own.unwrap_err().to_string().contains("not the context's own"));
        let host = table.record(|| {
            refuse("numbers on the host");
            Ok(())
        });
        assert!(host.unwrap_err().to_string().contains("numbers on the host"));
        assert!(seed_of(Stream::new(2)).is_none());
    }
}
