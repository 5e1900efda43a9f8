//! A relay between a driver and a worker that knows frames, and does to them what a script says: it cuts the connection before a
//! frame, inside it or after it, cuts it during a handshake, sends a frame twice, too late or out of order, leaves one out, or
//! carries nothing more.

use distgpipe_core::wire::{Kind, HEADER_BYTES};
use std::io::{Read, Write};
use std::net::{Shutdown, SocketAddr, TcpListener, TcpStream};
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

/// Who sends a frame.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum From {
    Driver,
    Worker,
}

/// Something that happens to a link.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[allow(dead_code)]
pub enum Act {
    CutBefore,
    CutInside,
    CutAfter,
    /// The frame arrives twice.
    Repeat,
    /// The first frame of the connection arrives once more after this one.
    Stale,
    /// The next frame arrives before this one.
    Swap,
    /// The frame does not arrive, the next one does.
    Skip,
    /// Nothing arrives any more on this connection, and nobody hears that it is over.
    Freeze,
}

/// Which frame it happens to.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum At {
    /// The frame with this sequence number, the first time that it passes.
    Sequence(u64),
    /// The first frame of this kind on this connection, counted from 0.
    Handshake(usize, Kind),
}

pub type Script = Vec<(From, At, Act)>;

pub struct CuttingRelay {
    pub address: SocketAddr,
    script: Arc<Mutex<Script>>,
    connections: Arc<AtomicUsize>,
    stopped: Arc<AtomicBool>,
    /// Every hello that has passed, with its header.
    pub hellos: Arc<Mutex<Vec<Vec<u8>>>>,
}

impl CuttingRelay {
    /// Listens on a port of its own, and forwards every connection to `to`.
    pub fn start(to: SocketAddr, script: Script) -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").expect("a port");
        let address = listener.local_addr().expect("an address");
        let (script, hellos) = (Arc::new(Mutex::new(script)), Arc::default());
        let connections = Arc::new(AtomicUsize::new(0));
        let stopped = Arc::new(AtomicBool::new(false));
        let relay = CuttingRelay { address, script, connections, stopped, hellos };
        let stopped = relay.stopped.clone();
        let (script, hellos, connections) = (relay.script.clone(), relay.hellos.clone(), relay.connections.clone());
        std::thread::spawn(move || {
            for near in listener.incoming() {
                let near = near.expect("a driver");
                if stopped.load(Ordering::SeqCst) {
                    break;
                }
                let number = connections.fetch_add(1, Ordering::SeqCst);
                // Nobody listens: so it is for the driver.
                let Ok(far) = TcpStream::connect(to) else { continue };
                for (sender, a, b) in [(From::Driver, &near, &far), (From::Worker, &far, &near)] {
                    let direction = Direction {
                        sender,
                        connection: number,
                        from: a.try_clone().expect("a handle"),
                        to: b.try_clone().expect("a handle"),
                        script: script.clone(),
                        hellos: hellos.clone(),
                    };
                    std::thread::spawn(move || direction.run());
                }
            }
        });
        relay
    }

    /// How many connections there have been.
    pub fn connections(&self) -> usize {
        self.connections.load(Ordering::SeqCst)
    }

    /// Accepts no more connections, and keeps those that there are.
    pub fn stop(&self) {
        self.stopped.store(true, Ordering::SeqCst);
        let _ = TcpStream::connect(self.address);
        let patience = Instant::now();
        while TcpStream::connect(self.address).is_ok() {
            assert!(patience.elapsed() < Duration::from_secs(60), "the relay does not stop");
        }
    }

    /// What of the script has not happened.
    pub fn left(&self) -> Script {
        self.script.lock().expect("no panic").clone()
    }
}

struct Direction {
    sender: From,
    connection: usize,
    from: TcpStream,
    to: TcpStream,
    script: Arc<Mutex<Script>>,
    hellos: Arc<Mutex<Vec<Vec<u8>>>>,
}

impl Direction {
    fn run(mut self) {
        let _ = self.to.set_nodelay(true);
        if self.forward().is_err() {
            let _ = self.to.shutdown(Shutdown::Both);
            let _ = self.from.shutdown(Shutdown::Both);
        }
    }

    /// Forwards frames until the connection ends, which is an error.
    fn forward(&mut self) -> std::io::Result<()> {
        // A frame that waits for the next one to overtake it, and the first frame of the connection.
        let (mut overtaken, mut first): (Option<Vec<u8>>, Option<Vec<u8>>) = (None, None);
        loop {
            let mut frame = vec![0; HEADER_BYTES];
            self.from.read_exact(&mut frame)?;
            let number = |at: usize| u64::from_le_bytes(frame[at..at + 8].try_into().expect("8 bytes"));
            let (kind, sequence, body) = (Kind::from_number(frame[6]), number(104), number(120));
            frame.resize(HEADER_BYTES + body as usize, 0);
            self.from.read_exact(&mut frame[HEADER_BYTES..])?;
            if kind == Some(Kind::Hello) {
                self.hellos.lock().expect("no panic").push(frame.clone());
            }
            let cut = || Err(std::io::ErrorKind::ConnectionAborted.into());
            if sequence > 0 {
                first.get_or_insert_with(|| frame.clone());
            }
            match self.act(kind, sequence) {
                None => {
                    self.to.write_all(&frame)?;
                    if sequence > 0 {
                        overtaken.take().map_or(Ok(()), |late| self.to.write_all(&late))?;
                    }
                }
                Some(Act::CutBefore) => return cut(),
                Some(Act::CutInside) => {
                    self.to.write_all(&frame[..HEADER_BYTES + body as usize / 2])?;
                    return cut();
                }
                Some(Act::CutAfter) => {
                    self.to.write_all(&frame)?;
                    return cut();
                }
                Some(Act::Repeat) => {
                    self.to.write_all(&frame)?;
                    self.to.write_all(&frame)?;
                }
                Some(Act::Stale) => {
                    self.to.write_all(&frame)?;
                    first.as_ref().map_or(Ok(()), |stale| self.to.write_all(stale))?;
                }
                Some(Act::Swap) => overtaken = Some(frame),
                Some(Act::Skip) => {}
                Some(Act::Freeze) => {
                    // Both sockets stay open, as with a cable that was pulled.
                    let mut ignored = [0; 4096];
                    while matches!(self.from.read(&mut ignored), Ok(1..)) {}
                    return cut();
                }
            }
        }
    }

    /// What happens to this frame.
    fn act(&self, kind: Option<Kind>, sequence: u64) -> Option<Act> {
        let mut script = self.script.lock().expect("no panic");
        let here = |(from, at, _): &(From, At, Act)| {
            *from == self.sender
                && match at {
                    At::Sequence(number) => sequence == *number,
                    At::Handshake(connection, wanted) => self.connection == *connection && kind == Some(*wanted),
                }
        };
        script.iter().position(here).map(|at| script.remove(at).2)
    }
}
