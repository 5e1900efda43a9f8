//! Workers in other processes, with a model of your own: one program is both driver and worker.
//!
//! Run it without arguments to start the workers on this host and train. To use other machines, run
//! `remote_workers serve 0.0.0.0:7000` on each, and give the driver `Workers::Remote` with their addresses and token.

use distgpipe::prelude::*;
use distgpipe::zoo::ModelError;
use distgpipe::{ServeOptions, Server, StuckPolicy, Token};
use std::{error::Error, sync::Arc};

/// Builds the model that a driver asks for. Driver and workers share this function, so a worker can build your own layers.
fn build(spec: &ModelSpec) -> Result<Model, ModelError> {
    match spec.name.as_str() {
        "digits" => Ok(Mlp { hidden: vec![96, 96], ..Mlp::default() }.model()?.with_spec(spec.clone())),
        other => Err(ModelError::Unknown { got: other.to_owned() }),
    }
}

fn worker(listen: &str, token: Token, expose: bool) -> Result<(), Box<dyn Error>> {
    distgpipe::tune_allocator();
    let server = Server::bind(ServeOptions {
        expose,
        once: !expose,
        models: build,
        on_stuck: StuckPolicy::ExitProcess,
        ..ServeOptions::new(listen.parse()?, token)
    })?;
    println!("listening {}", server.address()?);
    Ok(server.run(|| false, |event| eprintln!("{event:?}"))?)
}

fn driver() -> Result<(), Box<dyn Error>> {
    let workers = WorkerProgram { program: std::env::current_exe()?, arguments: vec!["child".to_owned()] };
    let model = build(&ModelSpec { name: "digits".to_owned(), settings: serde_json::Value::Null })?;
    let mut pipeline = Pipeline::builder(model)
        .balance([1, 1, 1])
        .place("client,server,client")
        .workers(Workers::Processes(workers))
        .micro_batches(4)
        .build()?;
    let digits = Digits::new(Split::Train, Default::default())?;
    let loader = Loader::new(Arc::new(digits), LoaderOptions::training(64, 0))?;
    for epoch in 0..3 {
        let mut loss = f64::NAN;
        for batch in loader.epoch(epoch) {
            loss = pipeline.train_step(&batch?)?.loss;
        }
        println!("epoch {epoch}: loss {loss:.3}");
    }
    Ok(())
}

fn main() -> Result<(), Box<dyn Error>> {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    match arguments.iter().map(String::as_str).collect::<Vec<_>>()[..] {
        [] => driver(),
        // The driver writes the token to the standard input of the processes it starts.
        ["child"] => worker("127.0.0.1:0", std::io::stdin().lines().next().ok_or("no token")??.parse()?, false),
        ["serve", address] => {
            let token = Token::random()?;
            println!("token {token}");
            worker(address, token, true)
        }
        _ => Err("usage: remote_workers [serve ADDRESS]".into()),
    }
}
