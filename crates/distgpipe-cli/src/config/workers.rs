//! Where the workers of a run are.

use crate::args::TrainFlags;
use crate::cmd::worker::given_token;
use crate::exit::usage;
use distgpipe::Workers;

/// The workers that `--workers` names. `count` includes this process and all replicas.
pub(super) fn workers(flags: &TrainFlags, count: usize) -> anyhow::Result<Workers> {
    let addresses: Vec<String> = match flags.workers.as_deref().unwrap_or("threads") {
        "threads" => return Ok(Workers::Threads),
        "processes" => return Ok(Workers::processes()),
        addresses => addresses.split(',').map(|address| address.trim().to_owned()).collect(),
    };
    if let Some(wrong) = addresses.iter().find(|address| !address.contains(':')) {
        return Err(usage(format!(
            "--workers {wrong}: expected `threads`, `processes`, or addresses such as 10.0.0.2:7000"
        )));
    }
    let port = |address: &str| address.rsplit_once(':').and_then(|(_, port)| port.parse::<u16>().ok());
    if let Some(wrong) = addresses.iter().find(|address| port(address).is_none_or(|port| port == 0)) {
        return Err(usage(format!(
            "--workers {wrong}: expected a port from 1 to 65535 after the last colon, such as 10.0.0.2:7000"
        )));
    }
    if let Some(twice) = addresses.iter().enumerate().find(|(i, address)| addresses[..*i].contains(address)) {
        return Err(usage(format!(
            "--workers: {} is named twice, and a worker process takes one worker's part: start another `distgpipe worker`",
            twice.1
        )));
    }
    if count == 1 {
        return Err(usage(
            "--workers: there is one partition, which runs in this process: cut the model with --partitions or --balance, or \
             use --replicas",
        ));
    }
    if addresses.len() + 1 != count {
        return Err(usage(format!(
            "--workers: expected {} address{} for {count} workers, because the first is this process; got {}: see --place and \
             --replicas",
            count.saturating_sub(1),
            if count == 2 { "" } else { "es" },
            addresses.len()
        )));
    }
    let token = given_token(flags.token_file.as_deref())?.ok_or_else(|| {
        usage("--workers: remote workers need their token: give it with --token-file FILE or the variable DISTGPIPE_TOKEN")
    })?;
    Ok(Workers::Remote { addresses, token })
}
