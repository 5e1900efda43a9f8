//! Connects a link test to a worker process on this host, or to a server.

use crate::comm::handshake::{self, Token};
use crate::comm::probe::bandwidth::{DialingEnd, LinkTest};
use crate::comm::server_identity::{JoinString, ServerIdentity};
use crate::comm::timeouts::Timeouts;
use crate::comm::transport::tcp::Resume;
use crate::driver::endpoint::Endpoint;
use crate::driver::gateway::{Gateway, GatewayOptions};
use crate::driver::job_limits::JobLimits;
use crate::driver::launch::{start_process, WorkerProgram};
use crate::engine::{self, Device};
use crate::failure::Fault;
use distgpipe_core::wire::Role;
use std::net::SocketAddr;
use std::process::{Child, Stdio};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::Arc;
use std::thread::JoinHandle;

/// Whom to measure the link to.
#[derive(Clone, Debug)]
pub enum LinkPeer {
    /// A worker process on this host, which ends with the test, over plain TCP.
    Process(WorkerProgram),
    /// A server in this process, which ends with the test, over TLS. It runs its end of the test in a worker process, as it runs
    /// jobs.
    LocalServer(WorkerProgram),
    /// A server that listens, over TLS.
    Server(JoinString),
}

/// A link that is being measured. Dropping it ends what was started for it.
pub struct LinkUnderTest {
    end: Option<DialingEnd>,
    /// Ends after the connection.
    _host: Host,
}

#[derive(Default)]
struct Host {
    children: Vec<Child>,
    gateway: Option<(Arc<AtomicBool>, JoinHandle<()>)>,
}

impl LinkUnderTest {
    /// Connects to a peer, and starts a test.
    pub fn connect(peer: &LinkPeer, test: &LinkTest, timeouts: Timeouts) -> Result<Self, Fault> {
        test.check()?;
        let mut host = Host::default();
        let endpoint = match peer {
            LinkPeer::Process(program) => {
                let token = Token::random()?;
                let limit = timeouts.connect();
                let address = start_process(program, &token, Stdio::inherit(), limit, &mut host.children)?;
                Endpoint::Plain { address, token }
            }
            LinkPeer::LocalServer(program) => Endpoint::Server(host.serve(program, test)?, None),
            LinkPeer::Server(server) => Endpoint::Server(server.clone(), None),
        };
        let (run, key) = (handshake::random()?, Token::random()?);
        let (stream, _) = endpoint.dial(Role::Driver, run, &key, Resume::first(timeouts.connect()))?;
        Ok(LinkUnderTest { end: Some(DialingEnd::start(stream, test, timeouts)?), _host: host })
    }

    /// The end that gives the orders.
    pub fn end(&mut self) -> Result<&mut DialingEnd, Fault> {
        self.end.as_mut().ok_or(Fault::Lost)
    }
}

impl Drop for LinkUnderTest {
    fn drop(&mut self) {
        if let Some(end) = self.end.take() {
            end.close();
        }
    }
}

impl Host {
    /// Starts a server on a loopback address, with a key of its own. Returns how to reach it.
    fn serve(&mut self, program: &WorkerProgram, test: &LinkTest) -> Result<JoinString, Fault> {
        let identity = ServerIdentity::generate()?;
        let limits = JobLimits { threads: test.threads, devices: Device::Cpu.into(), ..JobLimits::default() };
        let options = GatewayOptions {
            listen: SocketAddr::from(([127, 0, 0, 1], 0)),
            identity: identity.clone(),
            jobs: 1,
            program: program.clone(),
            limits,
            allow: Vec::new(),
            dial: Vec::new(),
            insecure: false,
        };
        let gateway = Gateway::bind(options, |_| ())?;
        let addresses = vec![gateway.address().to_string()];
        let stop = Arc::new(AtomicBool::new(false));
        let stopped = stop.clone();
        let thread = engine::spawn("local server", move || gateway.run(|| stopped.load(Ordering::Relaxed)))?;
        self.gateway = Some((stop, thread));
        Ok(JoinString { addresses, key: identity.key, secret: identity.secret })
    }
}

impl Drop for Host {
    fn drop(&mut self) {
        for child in &mut self.children {
            // Does nothing to a child that has ended.
            let _ = child.kill();
            let _ = child.wait();
        }
        if let Some((stop, thread)) = self.gateway.take() {
            stop.store(true, Ordering::Relaxed);
            let _ = thread.join();
        }
    }
}
