//! Checkpoints on a disk that stalls for longer than any peer may be silent, and is full afterwards. The run goes on with the older
//! checkpoint, makes steps meanwhile, and ends with the weights of one that meets none of this.
//!
//! The disk is a file with a file system that this test mounts, freezes and fills, for which it needs root and loop devices. Without
//! them it says so and tests nothing; with `DISTGPIPE_DISK_TESTS=1` that is a failure.

mod command;
mod serving;

use serving::{path, tensor_bytes, Client, Serve};
use std::io::{Read, Write};
use std::net::{TcpListener, TcpStream};
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::{Duration, Instant};

/// How long each piece of a message takes on a slow link. The run must go on for longer than 30 s after the disk has stalled, because
/// it tries again after that time.
const DELAY: Duration = Duration::from_millis(25);

/// A small file system of its own.
struct Disk(PathBuf);

fn system(program: &str, arguments: &[&str]) -> Result<(), String> {
    let output = Command::new(program).args(arguments).output().map_err(|e| format!("{program}: {e}"))?;
    match output.status.success() {
        true => Ok(()),
        false => Err(format!("{program} {arguments:?}: {}", String::from_utf8_lossy(&output.stderr).trim())),
    }
}

impl Disk {
    fn mount(folder: &Path) -> Result<Self, String> {
        let (image, mounted) = (folder.join("disk.img"), folder.join("disk"));
        std::fs::create_dir_all(&mounted).expect("a folder");
        std::fs::File::create(&image).and_then(|file| file.set_len(32 << 20)).expect("a file");
        system("mkfs.ext4", &["-q", "-F", path(&image)])?;
        system("mount", &["-o", "loop", path(&image), path(&mounted)])?;
        Ok(Disk(mounted))
    }

    /// Whoever writes waits until this value is dropped, as on a disk that does not answer.
    fn freeze(&self) -> Result<Frozen<'_>, String> {
        system("fsfreeze", &["--freeze", path(&self.0)]).map(|()| Frozen(self))
    }

    /// Takes all the room that is left.
    fn fill(&self) -> PathBuf {
        let ballast = self.0.join("ballast");
        let mut file = std::fs::File::create(&ballast).expect("a file");
        for bytes in [1 << 20, 1 << 12] {
            while file.write_all(&vec![0; bytes]).is_ok() {}
        }
        // What is not on the disk yet has its room there.
        let _ = file.sync_all();
        ballast
    }
}

/// A disk that does not answer. Nobody can even kill a process that waits for it.
struct Frozen<'a>(&'a Disk);

impl Drop for Frozen<'_> {
    fn drop(&mut self) {
        if let Err(error) = system("fsfreeze", &["--unfreeze", path(&self.0 .0)]) {
            eprintln!("{error}");
        }
    }
}

impl Drop for Disk {
    fn drop(&mut self) {
        if let Err(error) = system("umount", &[path(&self.0)]) {
            eprintln!("{error}");
        }
    }
}

/// Passes connections on to an address, slowly.
fn slow_link(to: String) -> String {
    let listener = TcpListener::bind("127.0.0.1:0").expect("a port");
    let address = listener.local_addr().expect("an address").to_string();
    std::thread::spawn(move || {
        for near in listener.incoming().flatten() {
            let far = TcpStream::connect(&to).expect("it listens");
            let handle = |stream: &TcpStream| stream.try_clone().expect("a handle");
            for (mut from, mut into) in [(handle(&near), handle(&far)), (handle(&far), handle(&near))] {
                std::thread::spawn(move || {
                    let mut buffer = vec![0; 1 << 20];
                    while let Ok(read @ 1..) = from.read(&mut buffer) {
                        std::thread::sleep(DELAY);
                        if into.write_all(&buffer[..read]).is_err() {
                            break;
                        }
                    }
                    let _ = into.shutdown(std::net::Shutdown::Write);
                });
            }
        }
    });
    address
}

/// A run over a server that has been joined under this name, and its log.
fn client(server: &Serve, name: &str, folder: &Path) -> (Client, PathBuf) {
    let log = server.folder.join(format!("log-{name}"));
    let mut command = server.command(&["train", "--model", "mlp", "--set", "hidden=[64,64]", "--batch", "64"]);
    command
        .args(["--place", "client,server,client", "--no-evaluate", "--epochs", "100000", "--steps", "350"])
        .args(["--lr", "0.01", "--server", name, "--restarts", "0", "--checkpoint-every", "20", "--log", path(&log)])
        .args(["--checkpoint", path(&folder.join("saved")), "--save", path(&folder.with_extension("safetensors"))]);
    (Client::start(command), log)
}

/// Waits for the end of a run. Returns the bytes of the tensors that it has saved.
fn weights(client: Client, folder: &Path) -> Vec<u8> {
    client.end();
    tensor_bytes(&folder.with_extension("safetensors"))
}

/// The steps in a log.
fn steps(log: &Path) -> usize {
    command::logged(log, "step").len()
}

#[test]
fn a_disk_that_stalls_and_is_full_afterwards_delays_checkpoints_and_nothing_else() {
    let mut server = Serve::start("failing-disk", &[]);
    let mounted = Disk::mount(&server.folder).and_then(|disk| disk.freeze().map(drop).map(|()| disk));
    let disk = match mounted {
        Ok(disk) => disk,
        Err(error) if std::env::var_os("DISTGPIPE_DISK_TESTS").is_none() => {
            eprintln!(
                "NOT TESTED: this test mounts a file system of its own, which this user or machine may not: {error}"
            );
            return;
        }
        Err(error) => panic!("{error}"),
    };
    let quiet = server.folder.join("quiet");
    std::fs::create_dir_all(&quiet).expect("a folder");
    let expected = weights(client(&server, "box", &quiet).0, &quiet);
    server.wait_for_ends(1);
    let (link, identity) = (slow_link(server.address.clone()), server.folder.join("identity"));
    let printed = server.client(&["serve", "--join-string", "--listen", &link, "--identity", path(&identity)], None);
    let joined = server.client(&["join", "slow"], Some(String::from_utf8_lossy(&printed.stdout).trim_end()));
    assert!(joined.status.success(), "{}", String::from_utf8_lossy(&joined.stderr));
    let (mut client, log) = client(&server, "slow", &disk.0);
    client.wait_for("saved step");
    let frozen = disk.freeze().unwrap_or_else(|e| panic!("{e}"));
    client.wait_for("the disk has not answered for 5 s; training waits for up to 30 s");
    client.wait_for("(1 of at most 5 failures in a row)");
    let (before, start) = (steps(&log), Instant::now());
    while steps(&log) < before + 10 {
        assert!(start.elapsed() < serving::LIMIT, "no steps while the disk does not answer: {:#?}", client.said);
        std::thread::sleep(Duration::from_millis(50));
    }
    client.skip();
    assert!(client.child.try_wait().expect("a child").is_none(), "it has ended: {:#?}", client.said);
    drop(frozen);
    client.wait_for("saved step");
    let ballast = disk.fill();
    client.wait_for("No space left on device");
    std::fs::remove_file(ballast).expect("it was made a moment ago");
    client.wait_for("saved step");
    assert!(weights(client, &disk.0) == expected, "other weights");
}
