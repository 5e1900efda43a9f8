//! What is encoded on the links between workers, and how long a link may stay silent.

use crate::args::TrainFlags;
use crate::exit::usage;
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
    Ok(CodecPolicy {
        backward: flags.codec_backward.clone().unwrap_or_else(|| forward.clone()),
        forward,
        links: flags.codec_link.iter().map(link).collect::<Result<_, _>>()?,
        warm_up_steps: flags.codec_warm_up.unwrap_or(0),
        evaluate: flags.evaluate_raw != Some(true),
    })
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
