//! Where the workers of a run are.

use crate::args::TrainFlags;
use crate::cmd::worker::given_token;
use crate::exit::usage;
use crate::mpi;
use crate::server_store;
use distgpipe::{JoinString, Workers};

/// The workers that `--workers` names. `count` includes this process and all replicas.
pub(super) fn workers(flags: &TrainFlags, count: usize) -> anyhow::Result<Workers> {
    if let Some(ranks) = mpi::workers(count)? {
        return Ok(ranks);
    }
    if let Some(servers) = servers(flags)? {
        return match servers.len() + 1 == count {
            true => {
                let (labels_leave, listen) = (flags.labels_leave == Some(true), flags.listen.clone());
                Ok(Workers::Servers { servers, labels_leave, listen })
            }
            false => Err(usage(format!(
                "--server: expected {} server{} for {count} workers, because the first is this process; got {}: see --place and \
                 --replicas",
                count.saturating_sub(1),
                if count == 2 { "" } else { "s" },
                servers.len()
            ))),
        };
    }
    if let Some(listen) = &flags.listen {
        let what = "it waits for a server that connects to this machine: add --server NAME, or remove it";
        return Err(usage(format!("--listen {listen}: {what}")));
    }
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
            "--workers: {} is named twice, and a worker process runs only one worker: start another `distgpipe worker`",
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

/// The servers that `--server`, `--server-file` or the environment name.
fn servers(flags: &TrainFlags) -> anyhow::Result<Option<Vec<JoinString>>> {
    let servers = match (&flags.server_file, flags.server.is_empty()) {
        (Some(_), false) => return Err(usage("--server and --server-file: use one of them")),
        (Some(path), true) => server_store::in_file(path)?,
        (None, false) => flags.server.iter().map(|name| server_store::read(name)).collect::<anyhow::Result<_>>()?,
        (None, true) if flags.workers.as_deref().unwrap_or("threads") == "threads" => {
            match server_store::in_environment()? {
                Some(servers) => servers,
                None => return Ok(None),
            }
        }
        (None, true) => return Ok(None),
    };
    if flags.workers.as_deref().is_some_and(|workers| workers != "threads") {
        return Err(usage("--server and --workers: use one of them"));
    }
    let same = |a: &JoinString, b: &JoinString| a.key == b.key && a.addresses == b.addresses;
    let twice = servers.iter().enumerate().any(|(i, server)| servers[..i].iter().any(|other| same(server, other)));
    match twice {
        true => Err(usage("--server: a server is named twice, and it runs one worker of a run: name another")),
        false => Ok(Some(servers)),
    }
}
