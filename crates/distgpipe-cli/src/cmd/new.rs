//! `distgpipe new`: a project that trains with the library, and builds and runs with plain `cargo run`.

use crate::args::quoted as quoted_for_shell;
use crate::exit::usage;
use crate::report;
use anyhow::Context;
use std::path::{Path, PathBuf};

/// The manifest, in which `{name}` and `{dependency}` are filled in.
const MANIFEST: &str = include_str!("../../template/Cargo.toml.in");

/// The other files of a project, by path; docs/library.md explains what each does.
const FILES: [(&str, &str); 4] = [
    (".cargo/config.toml", include_str!("../../template/config.toml")),
    (".gitignore", include_str!("../../template/gitignore")),
    ("build.rs", include_str!("../../template/build.rs")),
    ("src/main.rs", include_str!("../../template/main.rs")),
];

/// The link in a project that leads to libtorch.
const LIBTORCH_LINK: &str = ".libtorch";

/// Names that cargo or rustc refuse for a program although they are spelt like names, and that of the dependency.
const RESERVED: &str = "abstract alloc as async await become box break build const continue core crate deps distgpipe do dyn \
    else enum examples extern false final fn for gen if impl in incremental let loop macro match mod move mut override priv \
    proc-macro proc_macro pub ref return self static std struct super test trait true try type typeof unsafe unsized use \
    virtual where while yield";

/// Flags of `distgpipe new`.
#[derive(Debug, clap::Args)]
#[command(after_help = "\
Examples:
  distgpipe new my-app && cd my-app && cargo run
  distgpipe new my-app --path ~/src/distgpipe

The project trains a model of its own layers on its own data; src/main.rs is the place to start.
docs/library.md explains the files, for projects that exist already.")]
pub struct NewArgs {
    /// Folder of the project, which must be empty or not exist yet
    #[arg(value_name = "DIR")]
    directory: PathBuf,
    /// Name of the package [default: the name of the folder]
    #[arg(long, value_name = "NAME")]
    name: Option<String>,
    /// Depend on this checkout of distgpipe [default: the one this command was built from, or else the published version]
    #[arg(long, value_name = "CHECKOUT")]
    path: Option<PathBuf>,
    /// Depend on this git repository of distgpipe
    #[arg(long, value_name = "URL", conflicts_with = "path")]
    git: Option<String>,
}

/// Creates the project.
pub fn run(args: &NewArgs) -> anyhow::Result<()> {
    let name = name(args)?;
    check_parents(&args.directory)?;
    check_empty(&args.directory)?;
    let checkout = match &args.path {
        Some(path) => Some(checkout(path)?),
        None if args.git.is_some() => None,
        None => built_from(),
    };
    let libtorch = libtorch()?;
    let dependency = match (&args.git, &checkout) {
        (Some(url), _) => format!("distgpipe = {{ git = {} }}", quoted(url)),
        (None, Some(checkout)) => {
            let package = checkout.join("crates/distgpipe");
            let path = package.to_str().with_context(|| format!("{}: the path is not UTF-8", package.display()))?;
            format!("distgpipe = {{ path = {} }}", quoted(path))
        }
        (None, None) => format!("distgpipe = {}", quoted(env!("CARGO_PKG_VERSION"))),
    };
    let manifest = MANIFEST.replace("{name}", &name).replace("{dependency}", &dependency);
    write(&args.directory.join("Cargo.toml"), manifest.as_bytes())?;
    for (path, text) in FILES {
        write(&args.directory.join(path), text.as_bytes())?;
    }
    // The versions that distgpipe is tested with.
    let lock = checkout.as_ref().map(|checkout| checkout.join("Cargo.lock")).and_then(|path| std::fs::read(path).ok());
    if let Some(lock) = lock {
        write(&args.directory.join("Cargo.lock"), &lock)?;
    }
    let link = args.directory.join(LIBTORCH_LINK);
    std::os::unix::fs::symlink(&libtorch, &link).with_context(|| format!("creating {}", link.display()))?;
    report::print(&format!(
        "created {name} in {directory}, with {dependency} and libtorch at {libtorch}\n\n\
         cd {folder}\n\
         cargo run                     # trains; the first build takes some minutes\n\
         cargo run -- processes        # the same with a worker process\n\
         cargo run -- worker --help    # a worker on another machine\n",
        directory = args.directory.display(),
        folder = quoted_for_shell(&args.directory.display().to_string()),
        libtorch = libtorch.display(),
    ))
}

/// The package's name: `--name`, or else the name of the folder.
fn name(args: &NewArgs) -> anyhow::Result<String> {
    let (flag, name) = match &args.name {
        Some(name) => (format!("--name {name}"), name.clone()),
        None => {
            // `.` has no name of its own.
            let folder = args.directory.canonicalize().unwrap_or_else(|_| args.directory.clone());
            let name = folder.file_name().map(|name| name.to_string_lossy().into_owned()).unwrap_or_default();
            (format!("{}: `{name}` as the name of a package", args.directory.display()), name)
        }
    };
    let letters = |c: char| c.is_ascii_alphanumeric() || c == '-' || c == '_';
    if !name.starts_with(|c: char| c.is_ascii_alphabetic()) || !name.chars().all(letters) {
        return Err(usage(format!(
            "{flag}: expected a letter, and then letters, digits, `-` and `_`: choose another name with --name NAME"
        )));
    }
    if RESERVED.split_whitespace().any(|reserved| reserved == name) {
        return Err(usage(format!(
            "{flag}: Rust, cargo or distgpipe uses this name: choose another one with --name NAME"
        )));
    }
    Ok(name)
}

/// Whether every folder that the path leads through and out of again exists. To create such a folder would leave it empty.
fn check_parents(directory: &Path) -> anyhow::Result<()> {
    let through = directory.ancestors().filter(|path| path.ends_with("..")).filter_map(Path::parent);
    match through.filter(|path| !path.as_os_str().is_empty() && !path.exists()).last() {
        Some(missing) => Err(usage(format!(
            "{}: there is no folder {}: name the project's folder without `..`",
            directory.display(),
            missing.display()
        ))),
        None => Ok(()),
    }
}

fn check_empty(directory: &Path) -> anyhow::Result<()> {
    let wrong = |why: &str| Err(usage(format!("{}: {why}", directory.display())));
    match std::fs::read_dir(directory).map(|mut entries| entries.next().is_none()) {
        Ok(true) => Ok(()),
        Ok(false) => {
            wrong("expected a folder that is empty or does not exist, got one with files: name another folder")
        }
        Err(e) if e.kind() == std::io::ErrorKind::NotFound => Ok(()),
        Err(_) if directory.exists() && !directory.is_dir() => {
            wrong("expected a folder that is empty or does not exist, got a file: name another folder")
        }
        Err(e) => wrong(&e.to_string()),
    }
}

/// The checkout that `--path` names.
fn checkout(path: &Path) -> anyhow::Result<PathBuf> {
    let found = path.canonicalize().ok().filter(|path| path.join("crates/distgpipe/Cargo.toml").is_file());
    found.ok_or_else(|| {
        usage(format!(
            "--path {}: expected a checkout of distgpipe, which has crates/distgpipe/Cargo.toml: name the folder that `git clone` \
             made",
            path.display()
        ))
    })
}

/// The checkout that this command was built from, if it was built from one that is still there.
fn built_from() -> Option<PathBuf> {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).parent()?.parent()?;
    checkout(root).ok()
}

/// The directory of libtorch: `LIBTORCH`, or else the one that this command was built against.
fn libtorch() -> anyhow::Result<PathBuf> {
    let usable = |root: &Path| root.join("lib/libtorch_cpu.so").exists() && root.join("include").is_dir();
    if let Some(given) = std::env::var_os("LIBTORCH").filter(|value| !value.is_empty()) {
        let given = PathBuf::from(given);
        return match given.canonicalize().ok().filter(|root| given.is_absolute() && usable(root)) {
            Some(root) => Ok(root),
            None => Err(usage(format!(
                "the variable LIBTORCH is {}: expected the absolute path of a libtorch 2.11.0, with lib/ and include/: correct or \
                 unset it",
                given.display()
            ))),
        };
    }
    let built = option_env!("DISTGPIPE_LIBTORCH_LIB").and_then(|lib| Path::new(lib).parent());
    built.filter(|root| usable(root)).map(Path::to_owned).ok_or_else(|| {
        usage(
            "there is no libtorch where this command was built against one: set the variable LIBTORCH to the directory of a \
             libtorch 2.11.0, with lib/ and include/",
        )
    })
}

/// A string as TOML writes it.
fn quoted(text: &str) -> String {
    toml::Value::from(text).to_string()
}

fn write(path: &Path, bytes: &[u8]) -> anyhow::Result<()> {
    let folder = path.parent().unwrap_or(Path::new("."));
    std::fs::create_dir_all(folder).with_context(|| format!("creating {}", folder.display()))?;
    std::fs::write(path, bytes).with_context(|| format!("writing {}", path.display()))
}
