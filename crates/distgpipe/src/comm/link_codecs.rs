//! Tensors to bytes and back, at the two ends of a link: the run's codecs at work.
//!
//! ```text
//!  stage ──► Encoder: its codec, or raw where that refuses ──bytes──► Decoder: the same codec ──► mailbox
//! ```
//!
//! Each pair of partitions has its own codec in each direction, because a codec may remember. Both ends make theirs
//! from the job, so a frame says only which member of the family encoded it, and that it is raw where it is.

use crate::codecs::Codecs;
use crate::engine::{self, Layout};
use crate::failure::Fault;
use crate::job::Job;
use crate::mailbox::{Message, Tag};
use crate::trace::{now_ns, Beside, Phase};
use crate::transport::{Counters, Cut, Encoded};
use distgpipe_core::codec::raw::Raw;
use distgpipe_core::codec::{Alone, Codec, CodecError, CodecId, Context, Crew, TensorView};
use distgpipe_core::schedule::{Pass, Plan};
use distgpipe_core::wire::{self, DType, Header, Kind, Shape, TensorMeta, HEADER_BYTES};
use distgpipe_core::PartitionId;
use std::collections::HashMap;
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use std::sync::Arc;
use tch::Tensor;

/// What the links of a worker share.
#[derive(Clone)]
pub struct Coding {
    codecs: Arc<Codecs>,
    plan: Arc<Plan>,
    crew: Arc<dyn Crew>,
    /// Where what is decoded will be used.
    near: tch::Device,
    /// How often the codecs were told to forget.
    forgotten: Arc<AtomicU64>,
    /// What is done beside the stage, on the links' threads.
    pub beside: Beside,
}

impl Coding {
    /// For the worker of this job.
    pub fn new(job: &Job, plan: &Plan) -> Self {
        let crew: Arc<dyn Crew> = match job.threads {
            0 | 1 => Arc::new(Alone),
            size => Arc::new(Threads { size }),
        };
        Coding {
            codecs: Arc::new(job.codecs.clone()),
            plan: Arc::new(plan.clone()),
            crew,
            // A device that cannot be opened fails the worker by itself.
            near: job.device().open().unwrap_or(tch::Device::Cpu),
            forgotten: Arc::default(),
            beside: Beside::new(job.worker.0, job.trace),
        }
    }

    /// Has the codecs of all this worker's links forget what they remember, before they are next used. Both ends of a
    /// link must be told between the same two messages.
    pub fn forget(&self) {
        self.forgotten.fetch_add(1, Ordering::Release);
    }

    /// A codec for what goes by this name; `None` for what is never encoded.
    fn codec(&self, cut: Cut) -> Option<Box<dyn Codec>> {
        let spec = self.codecs.of(&self.plan, cut.pass, cut.from, cut.to);
        (!spec.is_raw()).then(|| spec.codec(self.crew.clone()))
    }
}

/// The cut that a message crosses, if it is one between partitions.
pub fn cut_of(tag: &Tag) -> Option<Cut> {
    let pass = match tag.kind {
        Kind::Activation => Pass::Forward,
        Kind::Gradient => Pass::Backward,
        _ => return None,
    };
    Some(Cut { pass, from: PartitionId(tag.from), to: PartitionId(tag.to) })
}

/// Codecs of one direction of a link, made when they are first needed. The plan bounds their number.
struct Made {
    coding: Coding,
    codecs: HashMap<Cut, Option<Box<dyn Codec>>>,
    /// What [`Coding::forgotten`] was when they were made.
    forgotten: u64,
}

impl Made {
    fn new(coding: Coding) -> Self {
        Made { forgotten: coding.forgotten.load(Ordering::Acquire), coding, codecs: HashMap::new() }
    }

    fn of(&mut self, cut: Cut) -> Option<&mut Box<dyn Codec>> {
        let forgotten = self.coding.forgotten.load(Ordering::Acquire);
        if forgotten != self.forgotten {
            self.forgotten = forgotten;
            self.codecs.clear();
        }
        self.codecs.entry(cut).or_insert_with(|| self.coding.codec(cut)).as_mut()
    }
}

/// The sending end.
pub struct Encoder {
    made: Made,
    counters: Counters,
    body: Vec<u8>,
}

impl Encoder {
    /// Counts on these counters.
    pub fn new(coding: Coding, counters: Counters) -> Self {
        Encoder { made: Made::new(coding), counters, body: Vec::new() }
    }

    /// Lends one tensor of a message, as it goes onto the wire, to `then`.
    pub fn with_encoded<T>(
        &mut self,
        message: &Message,
        index: usize,
        tensor: &Tensor,
        then: impl FnOnce(TensorMeta, &[u8]) -> Result<T, Fault>,
    ) -> Result<T, Fault> {
        let start = now_ns();
        let tensor = engine::on_host(tensor)?;
        let bytes = engine::bytes(&tensor).ok_or_else(|| Fault::protocol("a dense CPU tensor", "another"))?;
        let dims: Vec<usize> = tensor.size().iter().map(|&d| usize::try_from(d).unwrap_or(0)).collect();
        let shape = Shape::new(&dims).map_err(|e| Fault::protocol("a shape that can be sent", e.to_string()))?;
        let layout = match engine::layout(&tensor) {
            Some(Layout::ChannelsLast) => wire::Layout::ChannelsLast,
            _ => wire::Layout::Contiguous,
        };
        let view = TensorView { dtype: dtype_of(tensor.kind())?, dims: &dims, layout, bytes };
        let cut = cut_of(&message.tag);
        self.body.clear();
        let encoded = match cut {
            Some(cut) if message.handling.compress => self.encode(cut, message, index, view)?,
            _ => None,
        };
        if let (Some(cut), None) = (cut, encoded) {
            if self.made.of(cut).is_some() {
                self.counters.sent_raw(cut);
            }
        }
        let meta = TensorMeta { dtype: view.dtype, layout, shape, codec: encoded.unwrap_or(CodecId::Raw) };
        let as_it_is = encoded.is_none() && Raw.is_identity(view.dtype);
        if encoded.is_none() && !as_it_is {
            Raw.encode(view, &Context::default(), &mut self.body).map_err(not_encoded)?;
        }
        let body = if as_it_is { bytes } else { &self.body };
        if let Some(cut) = cut {
            let times = Encoded {
                raw_bytes: bytes.len() as u64,
                wire_bytes: (HEADER_BYTES + body.len()) as u64,
                encode_ns: now_ns().saturating_sub(start),
            };
            self.counters.encoded(cut, times);
            if encoded.is_some() {
                self.made.coding.beside.record(message.tag.step, Phase::Encode, &message.tag, start);
            }
        }
        then(meta, body)
    }

    /// Fills `body` by the cut's codec, if it has one and that takes the tensor.
    fn encode(
        &mut self,
        cut: Cut,
        message: &Message,
        index: usize,
        view: TensorView<'_>,
    ) -> Result<Option<CodecId>, Fault> {
        let Some(codec) = self.made.of(cut) else { return Ok(None) };
        let handling = &message.handling;
        let context = Context {
            slot: u64::from(message.tag.micro_batch) << 16 | index as u64,
            seed: handling.seed.wrapping_add(index as u64),
            samples: &handling.samples,
            learning: handling.learning,
        };
        match codec.encode(view, &context, &mut self.body) {
            Ok(()) => Ok(Some(codec.id())),
            Err(error) if error.refuses_tensor() => {
                let kind = match error {
                    CodecError::DType { .. } => "type",
                    CodecError::NotFinite { .. } => "not finite",
                    CodecError::Overflow { .. } => "too large",
                    _ => "shape",
                };
                self.counters.refused(cut, kind, || format!("{} {:?}: {error}", view.dtype, view.dims));
                Ok(None)
            }
            Err(error) => Err(not_encoded(error)),
        }
    }
}

fn not_encoded(error: CodecError) -> Fault {
    Fault::protocol("a tensor the codec takes", error.to_string())
}

/// The receiving end.
pub struct Decoder {
    /// Absent where no job is known yet: everything is raw then.
    made: Option<Made>,
    raw: Raw,
    counters: Counters,
    body: Vec<u8>,
}

impl Decoder {
    /// Counts on these counters.
    pub fn new(coding: Coding, counters: Counters) -> Self {
        Decoder { made: Some(Made::new(coding)), raw: Raw, counters, body: Vec::new() }
    }

    /// For connections that carry no job yet.
    pub fn raw() -> Self {
        Decoder { made: None, raw: Raw, counters: Counters::default(), body: Vec::new() }
    }

    /// Where a tensor of this kind goes next. Only what is computed with goes to the device.
    fn near(&self, kind: Kind) -> tch::Device {
        let computed = matches!(kind, Kind::Activation | Kind::Gradient | Kind::Input | Kind::Target | Kind::Share);
        self.made.as_ref().filter(|_| computed).map_or(tch::Device::Cpu, |made| made.coding.near)
    }

    /// The tensor of a frame whose header has been checked; `fill` reads its body.
    pub fn read(
        &mut self,
        header: &Header,
        meta: &TensorMeta,
        fill: impl FnOnce(&mut [u8]) -> Result<(), Fault>,
    ) -> Result<Tensor, Fault> {
        if meta.codec == CodecId::Raw && Raw.is_identity(meta.dtype) {
            let mut tensor = empty(meta, self.near(header.kind))?;
            let room = engine::bytes_mut(&mut tensor).ok_or_else(|| Fault::protocol("a dense tensor", "gaps"))?;
            fill(room)?;
            header.verify(room)?;
            return Ok(tensor);
        }
        let tag = Tag::of(header);
        // What the peer says is held against what the codec can make before there is room for it.
        let dims: Vec<usize> = meta.shape.dims().iter().map(|&d| usize::try_from(d).unwrap_or(usize::MAX)).collect();
        let codec = self.codec(&tag, meta.codec)?;
        let most = codec.encoded_bytes(meta.dtype, &dims) as u64;
        if header.body_bytes > most || !codec.size_varies() && header.body_bytes != most {
            let at_most = if codec.size_varies() { "at most " } else { "" };
            return Err(Fault::protocol(format!("{at_most}{most} bytes for {tag}"), header.body_bytes.to_string()));
        }
        let mut body = std::mem::take(&mut self.body);
        body.resize(usize::try_from(header.body_bytes).unwrap_or(usize::MAX), 0);
        fill(&mut body)?;
        header.verify(&body)?;
        let tensor = self.decode(&tag, meta, &body);
        self.body = body;
        tensor
    }

    /// The tensor of a body.
    pub fn decode(&mut self, tag: &Tag, meta: &TensorMeta, body: &[u8]) -> Result<Tensor, Fault> {
        let start = now_ns();
        let mut tensor = empty(meta, self.near(tag.kind))?;
        let room = engine::bytes_mut(&mut tensor).ok_or_else(|| Fault::protocol("a dense tensor", "gaps"))?;
        let decoded = self.codec(tag, meta.codec)?.decode(meta, body, room);
        decoded.map_err(|e| Fault::protocol(format!("a valid body of {tag}"), e.to_string()))?;
        if let Some((cut, made)) = cut_of(tag).zip(self.made.as_ref()) {
            self.counters.decoded(cut, now_ns().saturating_sub(start));
            if meta.codec != CodecId::Raw {
                made.coding.beside.record(tag.step, Phase::Decode, tag, start);
            }
        }
        Ok(tensor)
    }

    /// The codec for a frame of this name that says it was encoded so. Any frame may be raw; otherwise it has to be in
    /// the codec of the job.
    fn codec(&mut self, tag: &Tag, id: CodecId) -> Result<&mut dyn Codec, Fault> {
        if id == CodecId::Raw {
            return Ok(&mut self.raw);
        }
        let made = cut_of(tag).zip(self.made.as_mut());
        match made.and_then(|(cut, made)| made.of(cut)) {
            Some(codec) if codec.id() == id => Ok(codec.as_mut()),
            Some(codec) => Err(Fault::protocol(format!("{tag} in codec {} or raw", codec.id()), id.to_string())),
            None => Err(Fault::protocol(format!("{tag} raw"), format!("codec {id}"))),
        }
    }
}

/// Threads for large tensors, started for each: a tensor that is worth splitting takes far longer than starting them.
struct Threads {
    size: usize,
}

impl Crew for Threads {
    fn size(&self) -> usize {
        self.size
    }

    fn run(&self, tasks: usize, task: &(dyn Fn(usize) + Sync)) {
        let next = AtomicUsize::new(0);
        let work = || loop {
            let number = next.fetch_add(1, Ordering::Relaxed);
            if number >= tasks {
                return;
            }
            task(number);
        };
        std::thread::scope(|scope| {
            for _ in 1..self.size.min(tasks) {
                scope.spawn(work);
            }
            work();
        });
    }
}

fn empty(meta: &TensorMeta, near: tch::Device) -> Result<Tensor, Fault> {
    let dims: Vec<i64> = meta.shape.dims().iter().map(|&d| i64::try_from(d).unwrap_or(i64::MAX)).collect();
    let layout = match meta.layout {
        wire::Layout::ChannelsLast if dims.len() == 4 => Layout::ChannelsLast,
        _ => Layout::Contiguous,
    };
    engine::empty_near(near, &dims, kind_of(meta.dtype), layout)
}

/// Both ways in one table.
const KINDS: [(DType, tch::Kind); 10] = [
    (DType::F32, tch::Kind::Float),
    (DType::F64, tch::Kind::Double),
    (DType::F16, tch::Kind::Half),
    (DType::BF16, tch::Kind::BFloat16),
    (DType::I64, tch::Kind::Int64),
    (DType::I32, tch::Kind::Int),
    (DType::U8, tch::Kind::Uint8),
    (DType::Bool, tch::Kind::Bool),
    (DType::I16, tch::Kind::Int16),
    (DType::I8, tch::Kind::Int8),
];

pub(crate) fn dtype_of(kind: tch::Kind) -> Result<DType, Fault> {
    let found = KINDS.iter().find(|(_, k)| *k == kind);
    found.map(|(d, _)| *d).ok_or_else(|| Fault::protocol("an element type that can be sent", format!("{kind:?}")))
}

fn kind_of(dtype: DType) -> tch::Kind {
    KINDS.iter().find(|(d, _)| *d == dtype).map_or(tch::Kind::Float, |(_, k)| *k)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::codecs::Codecs;
    use distgpipe_core::placement::Placement;
    use distgpipe_core::schedule::{Request, Schedule};

    fn coding(codec: &str) -> Coding {
        let placement: Placement = "a,b".parse().unwrap();
        let plan = Schedule::GPipe.plan(&Request::new(placement, 1)).unwrap();
        Coding {
            codecs: Arc::new(Codecs::all(codec.parse().unwrap())),
            plan: Arc::new(plan),
            crew: Arc::new(Alone),
            near: tch::Device::Cpu,
            forgotten: Arc::default(),
            beside: Beside::new(0, false),
        }
    }

    fn message(kind: Kind) -> Message {
        let tag = Tag { kind, step: 0, micro_batch: 0, from: 0, to: 1 };
        let mut message = Message::tensors(tag, vec![Some(Tensor::from_slice(&[1.0f32, 2.0, 4.0, 8.0]))]);
        message.handling.compress = true;
        message
    }

    /// The header and the body of a message as one codec sends it.
    fn frame(codec: &str, kind: Kind) -> (Header, Vec<u8>) {
        let mut encoder = Encoder::new(coding(codec), Counters::default());
        let message = message(kind);
        let tensor = message.tensors[0].as_ref().unwrap().shallow_clone();
        let encoded = encoder.with_encoded(&message, 0, &tensor, |meta, body| {
            let mut header = Header { to: 1, tensor: Some(meta), ..Header::new(kind) };
            header.seal(body);
            Ok((header, body.to_vec()))
        });
        encoded.unwrap()
    }

    fn read(decoder: &mut Decoder, header: &Header, body: &[u8]) -> Result<Vec<f32>, String> {
        let meta = header.tensor.unwrap();
        let tensor = decoder.read(header, &meta, |into| {
            into.copy_from_slice(body);
            Ok(())
        });
        tensor.map(|t| Vec::<f32>::try_from(&t).unwrap()).map_err(|fault| fault.to_string())
    }

    #[test]
    fn a_decoder_takes_its_own_codec_and_raw_and_nothing_else() {
        let mut decoder = Decoder::new(coding("uniform:8"), Counters::default());
        let values = [1.0, 2.0, 4.0, 8.0];
        for codec in ["raw", "uniform:8"] {
            let (header, body) = frame(codec, Kind::Activation);
            let got = read(&mut decoder, &header, &body).unwrap();
            assert!(got.iter().zip(values).all(|(a, b)| (a - b).abs() < 0.02), "{codec}: {got:?}");
        }
        let (header, body) = frame("tile:8", Kind::Activation);
        let refused = read(&mut decoder, &header, &body).unwrap_err();
        assert!(refused.contains("in codec Uniform or raw") && refused.contains("Tile"), "{refused}");
        let (header, body) = frame("uniform:8", Kind::Activation);
        let refused = read(&mut Decoder::raw(), &header, &body).unwrap_err();
        assert!(refused.contains("raw") && refused.contains("Uniform"), "{refused}");
        // What is not between partitions is raw, whatever the codec.
        assert_eq!(frame("uniform:8", Kind::Input).0.tensor.unwrap().codec, CodecId::Raw);
    }

    /// `delta` sends a tensor the second time as what has changed, which only a decoder that remembers the first can read.
    #[test]
    fn ends_that_forget_together_go_on_as_if_new() {
        let (here, there) = (coding("delta(uniform:8)"), coding("delta(uniform:8)"));
        let mut encoder = Encoder::new(here.clone(), Counters::default());
        let mut decoder = Decoder::new(there.clone(), Counters::default());
        let mut send = || {
            let mut message = message(Kind::Activation);
            (message.handling.learning, message.handling.samples) = (true, vec![0, 1, 2, 3]);
            let tensor = message.tensors[0].as_ref().unwrap().shallow_clone();
            let sent = encoder.with_encoded(&message, 0, &tensor, |meta, body| {
                let got = decoder.decode(&message.tag, &meta, body)?;
                Ok((body.to_vec(), Vec::<f32>::try_from(&got).unwrap()))
            });
            sent.unwrap()
        };
        let first = send();
        assert_ne!(send(), first, "it remembers");
        here.forget();
        there.forget();
        assert_eq!(send(), first);
    }

    /// The room for a body is what the codec can make, not what the peer says.
    #[test]
    fn a_body_longer_than_its_tensor_is_refused_before_there_is_room_for_it() {
        let mut decoder = Decoder::new(coding("uniform:8"), Counters::default());
        let (mut header, _) = frame("uniform:8", Kind::Activation);
        header.body_bytes = 1 << 40;
        let meta = header.tensor.unwrap();
        let refused = decoder.read(&header, &meta, |_| panic!("nothing may be read")).unwrap_err().to_string();
        assert!(refused.contains("12 bytes") && refused.contains("1099511627776"), "{refused}");
        header.body_bytes = 11;
        assert!(decoder.read(&header, &meta, |_| panic!("nothing may be read")).is_err());
    }

    #[test]
    fn a_crew_does_every_task_once() {
        for size in [1, 2, 5] {
            let done: Vec<AtomicUsize> = (0..37).map(|_| AtomicUsize::new(0)).collect();
            Threads { size }.run(done.len(), &|task| {
                done[task].fetch_add(1, Ordering::Relaxed);
            });
            assert!(done.iter().all(|count| count.load(Ordering::Relaxed) == 1));
        }
    }
}
