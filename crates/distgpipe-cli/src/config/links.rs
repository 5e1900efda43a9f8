//! What is encoded on the links between workers, and how long a link may stay silent.

use crate::args::TrainFlags;
use crate::exit::usage;
use crate::report::note;
use distgpipe::comm::codec_policy::CodecPolicy;
use distgpipe::comm::timeouts::Timeouts;

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
            codec.clone().unwrap_or_default()
        }
    };
    let link = |text: &String| text.parse().map_err(|e| usage(format!("--codec-link: {e}")));
    let policy = CodecPolicy {
        backward: flags.codec_backward.clone().unwrap_or_else(|| forward.clone()),
        forward,
        links: flags.codec_link.iter().map(link).collect::<Result<_, _>>()?,
        warm_up_steps: flags.codec_warm_up.unwrap_or(0),
        evaluate: flags.evaluate_raw != Some(true),
    };
    // Not an error: another source of flags, such as a recipe, may have had a codec that these flags turn off.
    let idle = [("--codec-warm-up", policy.warm_up_steps > 0), ("--evaluate-raw", !policy.evaluate)];
    if !encodes(&policy) {
        for (flag, _) in idle.iter().filter(|(_, given)| *given) {
            note(&format!("warning: {flag}: it has no effect, because no link has a codec: add --codec, or remove it"));
        }
    }
    Ok(policy)
}

/// Whether a codec other than `raw` applies to any link.
fn encodes(policy: &CodecPolicy) -> bool {
    let links = policy.links.iter().flat_map(|link| [&link.forward, &link.backward]);
    links.chain([&policy.forward, &policy.backward]).any(|codec| !codec.is_raw())
}

/// The timeouts of a run. Without `--peer-timeout`, a silent worker is given no longer than `--timeout`.
pub(super) fn timeouts(flags: &TrainFlags) -> anyhow::Result<Timeouts> {
    let standard = Timeouts::default();
    let stall_s = flags.timeout.unwrap_or(standard.stall_s);
    let silence_s = flags.peer_timeout.unwrap_or(standard.silence_s.min(stall_s));
    for (flag, seconds) in [("--timeout", stall_s), ("--peer-timeout", silence_s)] {
        if !(seconds.is_finite() && seconds > 0.0) {
            return Err(usage(format!("{flag} {seconds}: expected seconds above 0")));
        }
    }
    Ok(Timeouts { stall_s, silence_s, ..standard })
}
