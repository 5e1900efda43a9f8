//! What is encoded on the links between workers, and how long a link may stay silent.
//!
//! `--codec auto` becomes a codec here, before anything else reads the flags: a checkpoint has the codec of its run.

use crate::args::{CodecChoice, TrainFlags};
use crate::exit::usage;
use crate::report::{note, units};
use anyhow::Context;
use distgpipe::comm::codec_policy::CodecPolicy;
use distgpipe::comm::probe::LinkMeasurement;
use distgpipe::comm::timeouts::{Timeouts, JOIN_S_MAX};
use distgpipe::Workers;
use distgpipe_core::codec::CodecSpec;

/// The codecs of all links.
pub(super) fn codecs(flags: &TrainFlags) -> anyhow::Result<CodecPolicy> {
    let parameters = [("--quant", flags.quant.is_some()), ("--split", flags.split.is_some())];
    let forward = match (flags.sortquant == Some(true), &flags.codec) {
        (true, Some(codec)) => {
            return Err(usage(format!("--sortquant and --codec {codec} both choose a codec: keep one")));
        }
        (true, None) => {
            let text = format!("sort:{}+{}", flags.quant.unwrap_or(6), flags.split.unwrap_or(2));
            text.parse().map_err(|e| usage(format!("--sortquant with --quant and --split: {e}")))?
        }
        (false, codec) => {
            if let Some((flag, _)) = parameters.iter().find(|(_, given)| *given) {
                return Err(usage(format!(
                    "{flag}: it applies to --sortquant only: add --sortquant, or use --codec sort:Q+S"
                )));
            }
            match codec {
                Some(CodecChoice::Codec(codec)) => codec.clone(),
                Some(CodecChoice::Auto) | None => CodecSpec::default(),
            }
        }
    };
    let link = |text: &String| text.parse().map_err(|e| usage(format!("--codec-link: {e}")));
    let policy = CodecPolicy {
        backward: flags.codec_backward.clone().unwrap_or_else(|| forward.clone()),
        forward,
        links: flags.codec_link.iter().map(link).collect::<Result<_, _>>()?,
        replicas: flags.codec_replicas.clone().unwrap_or_default(),
        warm_up_steps: flags.codec_warm_up.unwrap_or(0),
        evaluate: flags.evaluate_raw != Some(true),
    };
    // Not an error: another source of flags, such as a recipe, may have had a codec that these flags turn off.
    let idle = [("--codec-warm-up", policy.warm_up_steps > 0), ("--evaluate-raw", !policy.evaluate)];
    let replicas = flags.replicas.unwrap_or(1) > 1;
    if !policy.replicas.is_raw() && !replicas {
        note("warning: --codec-replicas: it has no effect without replicas: add --replicas, or remove it");
    }
    if !encodes(&policy) && (policy.replicas.is_raw() || !replicas) {
        for (flag, _) in idle.iter().filter(|(_, given)| *given) {
            note(&format!("warning: {flag}: it has no effect, because no link has a codec: add --codec, or remove it"));
        }
    }
    Ok(policy)
}

/// Replaces `--codec auto` by the codec that suits the slowest link, and says which it is.
pub(super) fn choose_codec(flags: &mut TrainFlags, workers: &Workers) -> anyhow::Result<()> {
    if flags.codec != Some(CodecChoice::Auto) {
        return Ok(());
    }
    let (codec, reason) = match workers {
        Workers::Remote { .. } | Workers::Servers { .. } => {
            let limit = timeouts(flags)?.connect();
            let mut slowest: Option<(String, LinkMeasurement)> = None;
            for (address, link) in workers.measure_links(limit).context("measuring the links for --codec auto")? {
                let link = link.with_context(|| format!("measuring the link to {address} for --codec auto"))?;
                if slowest.as_ref().is_none_or(|(_, other)| link.slower_per_s() < other.slower_per_s()) {
                    slowest = Some((address, link));
                }
            }
            let (address, link) = slowest.context("--codec auto: there is no link to measure")?;
            (codec_for(link.slower_per_s()), format!("for the link to {address}: {}", in_words(&link)))
        }
        #[cfg(feature = "mpi")]
        Workers::Mpi(_) => (RAW, "because MPI connects the workers".to_owned()),
        Workers::Threads => (RAW, "because all workers are threads of this process".to_owned()),
        _ => (RAW, "because all workers are on this host".to_owned()),
    };
    note(&format!("--codec auto: {codec}, {reason}"));
    flags.codec = Some(codec.parse().map_err(|e| anyhow::anyhow!("the codec {codec}: {e}"))?);
    Ok(())
}

const RAW: &str = "raw";

/// One thread compresses at least this many bytes per second losslessly, so that a faster link gains nothing from it.
const LOSSLESS_PER_S: f64 = 1e9;

/// The codec for a link that delivers this many bytes per second. `zstd(raw)` about halves what crosses the link, so a link of
/// half the speed of compression is as busy as the thread that compresses. A slower one is the bottleneck, and `zstd(tile:4)`
/// makes it several times faster.
fn codec_for(link_per_s: f64) -> &'static str {
    match link_per_s {
        rate if rate >= LOSSLESS_PER_S => RAW,
        rate if rate >= LOSSLESS_PER_S / 2.0 => "zstd(raw)",
        _ => "zstd(tile:4)",
    }
}

fn in_words(link: &LinkMeasurement) -> String {
    let (sent, received) = (units::bytes(link.sent_per_s), units::bytes(link.received_per_s));
    format!("{sent}/s there, {received}/s back, round trip {}", units::seconds(link.round_trip.as_secs_f64()))
}

/// Whether a codec other than `raw` applies to any link between partitions.
fn encodes(policy: &CodecPolicy) -> bool {
    let links = policy.links.iter().flat_map(|link| [&link.forward, &link.backward]);
    links.chain([&policy.forward, &policy.backward]).any(|codec| !codec.is_raw())
}

/// The timeouts of a run. Without `--peer-timeout`, a silent worker is given no longer than `--timeout`. `--peer-timeout` is
/// also the limit of a worker that does not answer while it joins the run.
pub(super) fn timeouts(flags: &TrainFlags) -> anyhow::Result<Timeouts> {
    let standard = Timeouts::default();
    let stall_s = flags.timeout.unwrap_or(standard.stall_s);
    let silence_s = flags.peer_timeout.unwrap_or(standard.silence_s.min(stall_s));
    for (flag, seconds) in [("--timeout", stall_s), ("--peer-timeout", silence_s)] {
        if !(seconds.is_finite() && seconds > 0.0) {
            return Err(usage(format!("{flag} {seconds}: expected seconds above 0")));
        }
    }
    let reconnect_s = flags.reconnect.unwrap_or(standard.reconnect_s);
    if !(reconnect_s.is_finite() && reconnect_s >= 0.0) {
        return Err(usage(format!("--reconnect {reconnect_s}: expected 0 seconds or more")));
    }
    if reconnect_s > JOIN_S_MAX {
        note(&format!("warning: --reconnect {reconnect_s}: a worker waits for at most {JOIN_S_MAX} s"));
    }
    Ok(Timeouts { stall_s, silence_s, reconnect_s, connect_s: flags.peer_timeout.unwrap_or(standard.connect_s) })
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The table in docs/codecs.md.
    #[test]
    fn auto_chooses_by_the_rate() {
        for (link_per_s, codec) in [
            (3e9, "raw"),
            (1e9, "raw"),
            (9e8, "zstd(raw)"),
            (5e8, "zstd(raw)"),
            (1.2e8, "zstd(tile:4)"),
            (1e3, "zstd(tile:4)"),
        ] {
            assert_eq!(codec_for(link_per_s), codec, "{link_per_s}");
            assert!(codec.parse::<CodecSpec>().is_ok());
        }
    }
}
