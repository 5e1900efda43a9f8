//! Codecs on a worker's GPU: only encoded bytes are copied between it and the host.
//!
//! ```text
//!  GPU   tensor ─kernels─► body ──copy──►  host   body ──► link ──► body  ──copy──► GPU   body ─kernels─► tensor
//! ```
//!
//! The bytes are those of the codec on the CPU, so the other end of the link need not have a GPU. What a codec refuses is left to the
//! codec on the CPU, which says why.

use super::dtype::kind_of;
use crate::engine::kernels::{self, codecs};
use crate::engine::{self, cuda, Layout};
use crate::failure::Fault;
use distgpipe_core::codec::feedback::BYTES_MAX;
use distgpipe_core::codec::{BodyForm, Codec, CodecContext, CodecForm, LruCache};
use distgpipe_core::wire::{self, DType, TensorMeta};
use tch::{Device, Kind, Tensor};

/// The errors that a codec with feedback has still to send, of one edge. They stay on the GPU.
pub(super) struct Residuals(LruCache<u64, Tensor>);

impl Default for Residuals {
    fn default() -> Self {
        Residuals(LruCache::new(BYTES_MAX))
    }
}

/// What became of a tensor.
pub(super) enum Encoded {
    /// There are no kernels for the codec, the tensor or the device.
    Unsupported,
    /// The codec refuses these values, which are the tensor with the residual of its slot.
    Refused(Tensor),
    /// The bytes of the body, on the GPU.
    Body(Tensor),
}

/// The number of the GPU on which this codec has kernels for tensors with this many elements of this type.
fn supported(device: Device, form: BodyForm, kind: Kind, elements: usize) -> Option<usize> {
    let is_float = matches!(kind, Kind::Float | Kind::Half | Kind::BFloat16);
    let index = cuda::index(device).filter(|_| is_float && codecs::supports(form, elements))?;
    kernels::check(index).is_ok().then_some(index)
}

/// Encodes a tensor on its GPU, in the thread's current stream. Waits until it is known whether the codec takes it.
pub(super) fn encode(
    codec: &dyn Codec,
    tensor: &Tensor,
    context: &CodecContext<'_>,
    residuals: &mut Residuals,
) -> Result<Encoded, Fault> {
    let Some(CodecForm { body: form, feedback }) = codec.form() else { return Ok(Encoded::Unsupported) };
    if supported(tensor.device(), form, tensor.kind(), tensor.numel()).is_none() {
        return Ok(Encoded::Unsupported);
    }
    tch::no_grad(|| {
        let wide = dense(&tensor.f_detach()?)?.f_to_kind(Kind::Float)?;
        let feedback = feedback && context.training;
        let kept = if feedback { residuals.0.get(&context.slot) } else { None };
        let alike = |kept: &&Tensor| kept.size() == wide.size() && engine::layout(kept) == engine::layout(&wide);
        let values = match kept.filter(alike) {
            Some(kept) => wide.f_add(kept)?,
            None => wide,
        };
        let ordered = in_order_of(form, &values)?;
        let dims: Vec<usize> = values.size().iter().map(|&dim| usize::try_from(dim).unwrap_or(0)).collect();
        let body_bytes = codec.encoded_bytes(DType::F32, &dims);
        let room = codecs::encode(&ordered, form, context.seed, body_bytes)?;
        let head = engine::on_host(&room.f_narrow(0, 0, codecs::HEAD_BYTES as i64)?)?;
        if engine::bytes(&head).and_then(|bytes| bytes.first_chunk()) != Some(&[0; 4]) {
            return Ok(Encoded::Refused(values));
        }
        let body = room.f_narrow(0, codecs::HEAD_BYTES as i64, body_bytes as i64)?;
        if feedback {
            let mut decoded = ordered.f_empty_like()?;
            codecs::decode(&body, form, &mut decoded)?;
            let (least, most) = (f64::from(f32::MIN), f64::from(f32::MAX));
            let residual = ordered.f_sub(&decoded)?.f_clamp_(least, most)?;
            let layout = engine::layout(&values).unwrap_or(Layout::Contiguous);
            let residual = engine::with_layout(&residual, layout)?;
            residuals.0.insert(context.slot, residual, 4 * values.numel());
        }
        Ok(Encoded::Body(body))
    })
}

/// Whether a body is decoded on the device.
pub(super) fn decodes(codec: &dyn Codec, meta: &TensorMeta, device: Device) -> bool {
    let Ok(elements) = usize::try_from(meta.decoded_bytes() / meta.dtype.size_bytes() as u64) else { return false };
    codec.form().is_some_and(|form| supported(device, form.body, kind_of(meta.dtype), elements).is_some())
}

/// Decodes a body on a GPU, if [`decodes`] says so. `body` is there already, or in host memory from where copies to the GPU are fast.
/// The result is ready when the thread's current stream has got that far. `None` if the codec has no kernels.
pub(super) fn decode(
    codec: &dyn Codec,
    meta: &TensorMeta,
    body: &Tensor,
    device: Device,
) -> Result<Option<Tensor>, Fault> {
    let (Some(form), Some(index)) = (codec.form(), cuda::index(device)) else { return Ok(None) };
    cuda::own_stream(index)?;
    tch::no_grad(|| {
        let dims: Vec<i64> = meta.shape.dims().iter().map(|&dim| i64::try_from(dim).unwrap_or(i64::MAX)).collect();
        let mut values = Tensor::f_empty(&dims, (Kind::Float, device))?;
        codecs::decode(&body.f_to_device_(device, Kind::Uint8, true, false)?, form.body, &mut values)?;
        if let (wire::Layout::ChannelsLast, &[n, channels, height, width]) = (meta.layout, dims.as_slice()) {
            values = match form.body {
                BodyForm::Tile { .. } => engine::with_layout(&values, Layout::ChannelsLast)?,
                _ => values.f_view([n, height, width, channels])?.f_permute([0, 3, 1, 2])?,
            };
        }
        let kind = kind_of(meta.dtype);
        let largest = match kind {
            Kind::Half => 65504.0,
            Kind::BFloat16 => f64::from(f32::from_bits(0x7f7f_0000)),
            _ => return Ok(Some(values)),
        };
        // As the adapter of the CPU codecs: finite values stay finite.
        Ok(Some(values.f_clamp_(-largest, largest)?.f_to_kind(kind)?))
    })
}

/// Starts to copy a tensor from memory of the host where `device` reads it directly, if that is a GPU. The copy is ready when the
/// thread's current stream has got that far.
pub(super) fn upload(tensor: Tensor, device: Device) -> Result<Tensor, Fault> {
    let Some(index) = cuda::index(device) else { return Ok(tensor) };
    cuda::own_stream(index)?;
    Ok(tensor.f_to_device_(device, tensor.kind(), true, false)?)
}

/// A tensor on a GPU for a body that is received there, in memory of the thread's own stream.
pub(super) fn empty(meta: &TensorMeta, device: Device) -> Result<Tensor, Fault> {
    if let Some(index) = cuda::index(device) {
        cuda::own_stream(index)?;
    }
    let dims: Vec<i64> = meta.shape.dims().iter().map(|&dim| i64::try_from(dim).unwrap_or(i64::MAX)).collect();
    let options = (kind_of(meta.dtype), device);
    Ok(match (meta.layout, dims.as_slice()) {
        (wire::Layout::ChannelsLast, &[n, channels, height, width]) => {
            Tensor::f_empty([n, height, width, channels], options)?.f_permute([0, 3, 1, 2])?
        }
        _ => Tensor::f_empty(&dims, options)?,
    })
}

/// The tensor in one of the two layouts.
pub(super) fn dense(tensor: &Tensor) -> Result<Tensor, Fault> {
    match engine::layout(tensor) {
        Some(_) => Ok(tensor.shallow_clone()),
        None => Ok(tensor.f_contiguous()?),
    }
}

/// The tensor with its values in the order in which the codec takes them: the logical order for tiles, that of memory for others.
fn in_order_of(form: BodyForm, tensor: &Tensor) -> Result<Tensor, Fault> {
    match form {
        BodyForm::Tile { .. } => engine::with_layout(tensor, Layout::Contiguous),
        _ => Ok(tensor.shallow_clone()),
    }
}
