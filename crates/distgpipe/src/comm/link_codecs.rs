//! Tensors to bytes and back, at the two ends of a link.
//!
//! ```text
//!  stage ──► Encoder: the edge's codec, or raw if the codec refuses ──bytes──► Decoder: the same codec ──► mailbox
//! ```
//!
//! Each pair of partitions has a codec of its own in each direction, because a codec may keep state. Both ends create it
//! from the job, so a frame only says which codec encoded it: the job's, or raw. The gradients that replicas share are bytes before
//! they come to a link ([`ShareCodecs`]).

mod decoder;
mod dtype;
mod encoder;
mod executor;
mod on_device;
mod shares;

pub(crate) use decoder::receive;
pub use decoder::{Decoder, FrameBody};
pub(crate) use dtype::dtype_of;
pub(crate) use encoder::EncodedBytes;
pub use encoder::Encoder;
#[cfg(feature = "mpi")]
pub(crate) use encoder::{EncodedBody, MemoryReach};
pub use shares::{Hop, ShareCodecs};

use crate::comm::codec_policy::CodecPolicy;
use crate::comm::protocol::Job;
use crate::comm::traffic::PartitionEdge;
use crate::runtime::trace::BackgroundRecorder;
use distgpipe_core::codec::{Codec, Executor, SerialExecutor};
use distgpipe_core::schedule::Plan;
use executor::Threads;
use on_device::Residuals;
use std::collections::HashMap;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::Arc;

/// What all links of a worker share to encode and decode. Clones share it too.
#[derive(Clone)]
pub struct LinkCodecs {
    codecs: Arc<CodecPolicy>,
    plan: Arc<Plan>,
    executor: Arc<dyn Executor>,
    /// The worker's device. Tensors that are decoded on the host are put into memory that it can read directly.
    device: tch::Device,
    /// How often the codecs have been reset.
    resets: Arc<AtomicU64>,
    /// Records what the links' threads do in the background, for traces.
    pub background: BackgroundRecorder,
}

impl LinkCodecs {
    /// The codecs of one worker's links, by its job.
    pub fn new(job: &Job, plan: &Plan) -> Self {
        LinkCodecs {
            codecs: Arc::new(job.codecs.clone()),
            plan: Arc::new(plan.clone()),
            executor: executor(job.threads),
            // If the device does not open, the worker fails when it builds its partitions.
            device: job.device().open().unwrap_or(tch::Device::Cpu),
            resets: Arc::default(),
            background: BackgroundRecorder::new(job.worker.0, job.trace),
        }
    }

    /// The worker's device.
    #[cfg(feature = "mpi")]
    pub(crate) fn device(&self) -> tch::Device {
        self.device
    }

    /// The codecs of a link that is measured without a job.
    pub(crate) fn of_test(codecs: CodecPolicy, plan: Plan, threads: usize) -> Self {
        LinkCodecs {
            codecs: Arc::new(codecs),
            plan: Arc::new(plan),
            executor: executor(threads),
            device: tch::Device::Cpu,
            resets: Arc::default(),
            background: BackgroundRecorder::new(0, false),
        }
    }

    /// Resets the codecs of all links of this worker to their initial state before they are next used. Both ends of a link
    /// must be reset between the same two messages.
    pub fn reset(&self) {
        self.resets.fetch_add(1, Ordering::Release);
    }

    /// A new codec for an edge; `None` if the edge is raw.
    fn codec(&self, edge: PartitionEdge) -> Option<Box<dyn Codec>> {
        let spec = self.codecs.codec(&self.plan, edge.pass, edge.from, edge.to);
        (!spec.is_raw()).then(|| spec.codec(self.executor.clone()))
    }
}

fn executor(threads: usize) -> Arc<dyn Executor> {
    match threads {
        0 | 1 => Arc::new(SerialExecutor),
        size => Arc::new(Threads { size }),
    }
}

/// The codecs of one direction of a link, created at first use. The plan bounds their number.
struct CodecCache {
    link_codecs: LinkCodecs,
    codecs: HashMap<PartitionEdge, Option<EdgeCodec>>,
    /// The value of [`LinkCodecs::resets`] when the codecs were created.
    resets: u64,
}

/// The codec of an edge, with what it keeps on a GPU.
struct EdgeCodec {
    codec: Box<dyn Codec>,
    residuals: Residuals,
}

impl CodecCache {
    fn new(link_codecs: LinkCodecs) -> Self {
        CodecCache { resets: link_codecs.resets.load(Ordering::Acquire), link_codecs, codecs: HashMap::new() }
    }

    /// The codec of an edge; `None` if the edge is raw.
    fn codec(&mut self, edge: PartitionEdge) -> Option<&mut EdgeCodec> {
        let resets = self.link_codecs.resets.load(Ordering::Acquire);
        if resets != self.resets {
            self.resets = resets;
            self.codecs.clear();
        }
        let codec = || self.link_codecs.codec(edge).map(|codec| EdgeCodec { codec, residuals: Residuals::default() });
        self.codecs.entry(edge).or_insert_with(codec).as_mut()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::comm::message::{Message, Tag};
    use crate::comm::traffic::Counters;
    use crate::failure::Fault;
    use distgpipe_core::codec::CodecId;
    use distgpipe_core::placement::Placement;
    use distgpipe_core::schedule::{Request, Schedule};
    use distgpipe_core::wire::{Header, Kind, Shape, TensorMeta};
    use tch::Tensor;

    fn link_codecs(codec: &str) -> LinkCodecs {
        let placement: Placement = "a,b".parse().unwrap();
        let plan = Schedule::GPipe.plan(&Request::new(placement, 1)).unwrap();
        LinkCodecs::of_test(CodecPolicy::all(codec.parse().unwrap()), plan, 1)
    }

    fn message(kind: Kind) -> Message {
        let tag = Tag { kind, step: 0, micro_batch: 0, from: 0, to: 1 };
        let mut message = Message::tensors(tag, vec![Some(Tensor::from_slice(&[1.0f32, 2.0, 4.0, 8.0]))]);
        message.encoding.compress = true;
        message
    }

    /// The frame of [`message`] as an encoder with this codec sends it.
    fn frame(codec: &str, kind: Kind) -> (Header, Vec<u8>) {
        let mut encoder = Encoder::new(link_codecs(codec), Counters::default());
        let message = message(kind);
        let tensor = message.tensors[0].as_ref().unwrap().shallow_clone();
        let encoded = encoder.with_encoded(&message, 0, &tensor, |meta, body| {
            let mut header = Header { to: 1, tensor: Some(meta), ..Header::new(kind) };
            header.seal(body);
            Ok((header, body.to_vec()))
        });
        encoded.unwrap()
    }

    /// The body of a frame; `Nothing` if none may be read.
    struct Sent<'a>(&'a [u8]);
    struct Nothing;

    impl FrameBody for Sent<'_> {
        fn read(&mut self, piece: &mut [u8]) -> Result<(), Fault> {
            piece.copy_from_slice(&self.0[..piece.len()]);
            self.0 = &self.0[piece.len()..];
            Ok(())
        }
        fn verify(self) -> Result<(), Fault> {
            assert!(self.0.is_empty());
            Ok(())
        }
    }

    impl FrameBody for Nothing {
        fn read(&mut self, _: &mut [u8]) -> Result<(), Fault> {
            panic!("nothing may be read")
        }
        fn verify(self) -> Result<(), Fault> {
            panic!("nothing may be read")
        }
    }

    fn read(decoder: &mut Decoder, header: &Header, body: &[u8]) -> Result<Vec<f32>, String> {
        let meta = header.tensor.unwrap();
        let tensor = decoder.read(header, &meta, Sent(body));
        tensor.map(|t| Vec::<f32>::try_from(&t).unwrap()).map_err(|fault| fault.to_string())
    }

    #[test]
    fn a_decoder_accepts_its_own_codec_and_raw_alone() {
        let mut decoder = Decoder::new(link_codecs("uniform:8"), Counters::default());
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
        // Messages that are not between partitions are raw, whatever the codec.
        assert_eq!(frame("uniform:8", Kind::Input).0.tensor.unwrap().codec, CodecId::Raw);
    }

    /// `delta` encodes the second tensor as the difference to the first, which only a decoder that has kept the first can decode.
    #[test]
    fn ends_that_are_reset_together_start_again() {
        let (here, there) = (link_codecs("delta(uniform:8)"), link_codecs("delta(uniform:8)"));
        let mut encoder = Encoder::new(here.clone(), Counters::default());
        let mut decoder = Decoder::new(there.clone(), Counters::default());
        let mut send = || {
            let mut message = message(Kind::Activation);
            (message.encoding.training, message.encoding.samples) = (true, vec![0, 1, 2, 3]);
            let tensor = message.tensors[0].as_ref().unwrap().shallow_clone();
            let sent = encoder.with_encoded(&message, 0, &tensor, |meta, body| {
                let got = decoder.decode(&message.tag, &meta, body)?;
                Ok((body.to_vec(), Vec::<f32>::try_from(&got).unwrap()))
            });
            sent.unwrap()
        };
        let first = send();
        assert_ne!(send(), first, "the second message depends on the first");
        here.reset();
        there.reset();
        assert_eq!(send(), first);
    }

    /// Masks and token ids have no codec of their own, but `zstd` compresses them without loss.
    #[test]
    fn integers_go_through_zstd_and_raw_through_other_codecs() {
        let mask = Tensor::from_slice(&[1i64, 0, 0, 0].repeat(100)).view([8, 50]);
        for (codec, expected) in
            [("zstd(tile:4)", CodecId::Zstd), ("zstd(raw)", CodecId::Zstd), ("tile:4", CodecId::Raw)]
        {
            let mut encoder = Encoder::new(link_codecs(codec), Counters::default());
            let mut decoder = Decoder::new(link_codecs(codec), Counters::default());
            let message = message(Kind::Activation);
            let sent = encoder.with_encoded(&message, 1, &mask, |meta, body| {
                Ok((meta.codec, body.len(), decoder.decode(&message.tag, &meta, body)?))
            });
            let (id, bytes, decoded) = sent.unwrap();
            assert_eq!((id, decoded == mask), (expected, true), "{codec}");
            assert_eq!(bytes < 3200 / 20, expected == CodecId::Zstd, "{codec}: {bytes} bytes");
        }
    }

    /// The decoder allocates what the codec can produce for the shape, not what the peer announces.
    #[test]
    fn a_body_of_the_wrong_size_is_rejected_before_anything_is_allocated() {
        let mut decoder = Decoder::new(link_codecs("uniform:8"), Counters::default());
        let (mut header, _) = frame("uniform:8", Kind::Activation);
        header.body_bytes = 1 << 40;
        let meta = header.tensor.unwrap();
        let refused = decoder.read(&header, &meta, Nothing).unwrap_err().to_string();
        assert!(refused.contains("12 bytes") && refused.contains("1099511627776"), "{refused}");
        header.body_bytes = 11;
        assert!(decoder.read(&header, &meta, Nothing).is_err());
    }

    /// A header of 136 bytes once made a client or a server allocate and clear all that it announced. The body is received piece by
    /// piece, and a connection that ends after the first has cost no more than that.
    #[test]
    fn memory_grows_with_the_body_that_arrives_and_not_with_the_one_that_is_announced() {
        /// Sends one piece.
        struct Cut(usize);
        impl FrameBody for Cut {
            fn read(&mut self, piece: &mut [u8]) -> Result<(), Fault> {
                assert!(piece.len() <= 4 << 20, "{} bytes at once", piece.len());
                piece.fill(1);
                self.0 += 1;
                if self.0 > 1 {
                    Err(Fault::Lost)
                } else {
                    Ok(())
                }
            }
            fn verify(self) -> Result<(), Fault> {
                panic!("it is not complete")
            }
        }
        let mut decoder = Decoder::new(link_codecs("bf16"), Counters::default());
        let (mut header, _) = frame("bf16", Kind::Activation);
        let meta = TensorMeta { shape: Shape::new(&[96 << 20]).unwrap(), ..header.tensor.unwrap() };
        (header.tensor, header.body_bytes) = (Some(meta), 192 << 20);
        assert!(matches!(decoder.read(&header, &meta, Cut(0)), Err(Fault::Lost)));
        assert!(decoder.touched_bytes() <= 16 << 20, "{} bytes", decoder.touched_bytes());
    }

    /// A raw body is received into the tensor itself, whose memory is allocated whole. Pages that nobody has touched take none.
    #[test]
    fn the_memory_of_a_raw_tensor_is_touched_as_its_body_arrives() {
        use std::os::unix::fs::FileExt;
        /// How much of this memory has been touched: the system has a page for it.
        fn touched_bytes(memory: &[u8]) -> usize {
            const PAGE_BYTES: usize = 4096;
            let (first, pages) = (memory.as_ptr() as usize / PAGE_BYTES, memory.len() / PAGE_BYTES);
            let mut entries = vec![0; 8 * pages];
            let table = std::fs::File::open("/proc/self/pagemap").expect("Linux lists a process's own pages");
            table.read_exact_at(&mut entries, 8 * first as u64).unwrap();
            let present = |entry: &&[u8]| entry[7] & 0x80 != 0;
            PAGE_BYTES * entries.chunks(8).filter(present).count()
        }
        /// A body that ends after 8 MiB.
        struct Cut;
        impl FrameBody for Cut {
            fn read(&mut self, piece: &mut [u8]) -> Result<(), Fault> {
                assert_eq!(piece.len(), 192 << 20);
                assert!(touched_bytes(piece) <= 4 << 20, "{} bytes before anything arrived", touched_bytes(piece));
                piece[..8 << 20].fill(1);
                assert!((8 << 20..12 << 20).contains(&touched_bytes(piece)), "{} bytes", touched_bytes(piece));
                Err(Fault::Lost)
            }
            fn verify(self) -> Result<(), Fault> {
                panic!("it is not complete")
            }
        }
        for kind in [Kind::Activation, Kind::State] {
            let mut decoder = Decoder::new(link_codecs("raw"), Counters::default());
            let (mut header, _) = frame("raw", kind);
            let meta = TensorMeta { shape: Shape::new(&[48 << 20]).unwrap(), ..header.tensor.unwrap() };
            (header.tensor, header.body_bytes) = (Some(meta), 192 << 20);
            assert!(matches!(decoder.read(&header, &meta, Cut), Err(Fault::Lost)));
        }
    }

    /// Body and tensor together, whatever the codec. At the driver too, whose process has no limit of its own.
    #[test]
    fn what_a_peer_announces_is_compared_with_the_memory_of_this_host_first() {
        for codec in ["raw", "bf16", "zstd(raw)", "topk:0.1"] {
            let mut decoder = Decoder::new(link_codecs(codec), Counters::default());
            let (mut header, _) = frame(codec, Kind::Activation);
            let shape = Shape::new(&[1 << 30, 1 << 14]).unwrap();
            let meta = TensorMeta { shape, ..header.tensor.unwrap() };
            header.body_bytes = match codec {
                "raw" => 1 << 46,
                "bf16" => 1 << 45,
                _ => 10,
            };
            header.tensor = Some(meta);
            let refused = decoder.read(&header, &meta, Nothing).unwrap_err().to_string();
            let figure = if codec == "bf16" { "105.6 TB" } else { "70.4 TB" };
            let expected = format!("a tensor from a peer takes {figure} of memory");
            assert!(refused.contains(&expected), "{codec}: {refused}");
        }
    }

    /// A frame with a body of a hundred MiB once left a buffer of that size behind for the rest of the run.
    #[test]
    fn the_buffer_of_a_large_body_does_not_outlive_its_use() {
        let mut decoder = Decoder::new(link_codecs("bf16"), Counters::default());
        let values = 40 << 20;
        let meta =
            TensorMeta { shape: Shape::new(&[values]).unwrap(), ..frame("bf16", Kind::Activation).0.tensor.unwrap() };
        let (mut header, body) =
            (Header { to: 1, tensor: Some(meta), ..Header::new(Kind::Activation) }, vec![0; 2 * values]);
        header.seal(&body);
        read(&mut decoder, &header, &body).unwrap();
        assert!(decoder.kept_bytes() >= 80 << 20);
        let (header, body) = frame("bf16", Kind::Activation);
        read(&mut decoder, &header, &body).unwrap();
        assert!(decoder.kept_bytes() < 1 << 20);
    }

    /// A body that comes from a GPU, in the memory of another process.
    struct GpuBody {
        values: Tensor,
        verified: bool,
    }

    impl FrameBody for &mut GpuBody {
        fn read(&mut self, piece: &mut [u8]) -> Result<(), Fault> {
            panic!("{} bytes are read on the host", piece.len())
        }

        fn comes_from_a_gpu(&self) -> bool {
            true
        }

        fn read_on_gpu(&mut self, into: &Tensor) -> Result<(), Fault> {
            assert!(into.device().is_cuda());
            tch::no_grad(|| into.shallow_clone().copy_(&self.values));
            Ok(())
        }

        fn verify(self) -> Result<(), Fault> {
            self.verified = true;
            Ok(())
        }
    }

    /// Without `DISTGPIPE_GPU_TESTS=1` it does nothing, because CI has no GPU.
    #[test]
    fn raw_tensors_from_a_gpu_arrive_with_their_layout_and_values() {
        if std::env::var_os("DISTGPIPE_GPU_TESTS").is_none() {
            return println!("NOT TESTED: needs a GPU and DISTGPIPE_GPU_TESTS=1");
        }
        let gpu = crate::engine::Device::Cuda(0).open().unwrap();
        let mut link_codecs = link_codecs("raw");
        link_codecs.device = gpu;
        let mut decoder = Decoder::new(link_codecs, Counters::default());
        for layout in [crate::engine::Layout::Contiguous, crate::engine::Layout::ChannelsLast] {
            for kind in [tch::Kind::Float, tch::Kind::BFloat16] {
                let values = tch::no_grad(|| Tensor::randn([3, 5, 7, 9], (tch::Kind::Float, gpu)).to_kind(kind));
                let values = crate::engine::with_layout(&values, layout).unwrap();
                let meta = TensorMeta {
                    codec: CodecId::Raw,
                    dtype: dtype_of(kind).unwrap(),
                    shape: Shape::new(&[3, 5, 7, 9]).unwrap(),
                    layout: match layout {
                        crate::engine::Layout::Contiguous => distgpipe_core::wire::Layout::Contiguous,
                        crate::engine::Layout::ChannelsLast => distgpipe_core::wire::Layout::ChannelsLast,
                    },
                };
                let body_bytes = (values.numel() * values.kind().elt_size_in_bytes()) as u64;
                let header = Header { to: 1, tensor: Some(meta), body_bytes, ..Header::new(Kind::Activation) };
                let mut body = GpuBody { values, verified: false };
                let got = decoder.read(&header, &meta, &mut body).unwrap();
                assert!(got.device().is_cuda() && body.verified);
                assert_eq!((got.kind(), got.stride()), (kind, body.values.stride()));
                assert!(got.equal(&body.values));
            }
        }
    }

    /// A worker with a GPU and one without send the same bytes and get the same values, step by step. Without `DISTGPIPE_GPU_TESTS=1`
    /// it does nothing, because CI has no GPU.
    #[test]
    fn links_of_a_gpu_carry_the_bytes_of_the_cpu() {
        if std::env::var("DISTGPIPE_GPU_TESTS").as_deref() != Ok("1") {
            eprintln!("NOT TESTED: this test needs a GPU and DISTGPIPE_GPU_TESTS=1");
            return;
        }
        let gpu = crate::engine::Device::Cuda(0).open().unwrap();
        for codec in [
            "tile:4",
            "tile:3~",
            "sort:8",
            "fast:8",
            "f16",
            "uniform:4",
            "feedback(tile:2)",
            "feedback(sort:4)",
            "topk:0.1",
        ] {
            for kind in [tch::Kind::Float, tch::Kind::BFloat16, tch::Kind::Half] {
                let ends = [tch::Device::Cpu, gpu].map(|device| {
                    let mut link_codecs = link_codecs(codec);
                    link_codecs.device = device;
                    let encoder = Encoder::new(link_codecs.clone(), Counters::default());
                    (device, encoder, Decoder::new(link_codecs, Counters::default()))
                });
                let [mut here, mut there] = ends;
                for step in 0..6 {
                    let x = tch::no_grad(|| Tensor::randn([3, 5, 7, 9], (tch::Kind::Float, tch::Device::Cpu)));
                    let x = x.to_kind(kind);
                    let x = match step {
                        2 | 3 => crate::engine::with_layout(&x, crate::engine::Layout::ChannelsLast).unwrap(),
                        4 => {
                            let _ = x.view([-1]).narrow(0, 77, 1).fill_(f64::NAN);
                            x
                        }
                        _ => x,
                    };
                    let send = |(device, encoder, decoder): &mut (tch::Device, Encoder, Decoder)| {
                        // Evaluated first, which must leave no trace in the residuals.
                        let mut message = message(Kind::Activation);
                        message.encoding.seed = step;
                        let passed = encoder.round_trip(&message, 0, &x.to_device(*device), decoder).unwrap();
                        message.encoding.training = true;
                        let sent = encoder.with_encoded(&message, 0, &x.to_device(*device), |meta, body| {
                            let got = decoder.decode(&message.tag, &meta, body)?;
                            Ok((meta, body.to_vec(), got, passed))
                        });
                        sent.unwrap()
                    };
                    let (cpu, gpu) = (send(&mut here), send(&mut there));
                    assert_eq!((cpu.0, &cpu.1), (gpu.0, &gpu.1), "{codec} {kind:?} in step {step}");
                    let raw = cpu.0.codec == CodecId::Raw;
                    assert_eq!(raw, step == 4, "{codec} {kind:?} in step {step}");
                    assert_eq!(gpu.2.device().is_cuda(), !raw && codec != "topk:0.1", "{codec}");
                    assert_eq!(cpu.2.stride(), gpu.2.stride(), "{codec} {kind:?} in step {step}");
                    let got = gpu.2.to_device(tch::Device::Cpu);
                    assert_eq!(
                        crate::engine::bytes(&cpu.2),
                        crate::engine::bytes(&got),
                        "{codec} {kind:?} in step {step}"
                    );
                    let passed = gpu.3.to_device(tch::Device::Cpu);
                    let [here, there] = [&cpu.3, &passed].map(crate::engine::bytes);
                    assert_eq!(here, there, "{codec} {kind:?} in step {step}");
                }
            }
        }
    }
}
