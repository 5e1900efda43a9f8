//! NVRTC, NVIDIA's compiler of CUDA C++ at run time.

use super::library::{cuda_folders, Library};
use super::Program;
use libc::{c_char, c_int};
use std::ffi::{CStr, CString};
use std::path::{Path, PathBuf};
use std::ptr::{null, null_mut};
use std::sync::OnceLock;

/// The names of the library, newest first.
const NAMES: [&str; 2] = ["libnvrtc.so.13", "libnvrtc.so.12"];

/// What every kernel is compiled with. A product and a sum must not become one fused operation, whose rounding is another one than
/// the CPU's.
const OPTIONS: [&CStr; 2] = [c"--std=c++17", c"--fmad=false"];

/// A compiled program.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Code {
    /// Instructions of one architecture.
    Cubin(Vec<u8>),
    /// NUL-terminated text that the driver compiles.
    Ptx(Vec<u8>),
}

impl Code {
    /// The bytes that the driver loads.
    pub fn bytes(&self) -> &[u8] {
        match self {
            Code::Cubin(bytes) | Code::Ptx(bytes) => bytes,
        }
    }
}

/// A compute capability times ten, such as 90.
pub type Architecture = c_int;

type Handle = *mut libc::c_void;
type Status = c_int;

/// The functions of the library.
pub struct Nvrtc {
    create: unsafe extern "C" fn(
        *mut Handle,
        *const c_char,
        *const c_char,
        c_int,
        *const *const c_char,
        *const *const c_char,
    ) -> Status,
    destroy: unsafe extern "C" fn(*mut Handle) -> Status,
    compile: unsafe extern "C" fn(Handle, c_int, *const *const c_char) -> Status,
    error: unsafe extern "C" fn(Status) -> *const c_char,
    log: Output,
    ptx: Output,
    cubin: Output,
    architecture_count: unsafe extern "C" fn(*mut c_int) -> Status,
    architectures: unsafe extern "C" fn(*mut c_int) -> Status,
}

/// The functions that give the length of a result, and the result.
struct Output {
    length: unsafe extern "C" fn(Handle, *mut usize) -> Status,
    get: unsafe extern "C" fn(Handle, *mut c_char) -> Status,
}

impl Nvrtc {
    /// The library of this process, loaded at the first call.
    pub fn get() -> Result<&'static Nvrtc, String> {
        static LOADED: OnceLock<Result<Nvrtc, String>> = OnceLock::new();
        LOADED.get_or_init(Nvrtc::load).as_ref().map_err(String::clone)
    }

    fn load() -> Result<Nvrtc, String> {
        let library = find()?;
        // SAFETY: nvrtc.h declares the functions with the types of the fields.
        unsafe {
            Ok(Nvrtc {
                create: library.function(c"nvrtcCreateProgram")?,
                destroy: library.function(c"nvrtcDestroyProgram")?,
                compile: library.function(c"nvrtcCompileProgram")?,
                error: library.function(c"nvrtcGetErrorString")?,
                log: Output {
                    length: library.function(c"nvrtcGetProgramLogSize")?,
                    get: library.function(c"nvrtcGetProgramLog")?,
                },
                ptx: Output { length: library.function(c"nvrtcGetPTXSize")?, get: library.function(c"nvrtcGetPTX")? },
                cubin: Output {
                    length: library.function(c"nvrtcGetCUBINSize")?,
                    get: library.function(c"nvrtcGetCUBIN")?,
                },
                architecture_count: library.function(c"nvrtcGetNumSupportedArchs")?,
                architectures: library.function(c"nvrtcGetSupportedArchs")?,
            })
        }
    }

    /// Compiles a program for an architecture. If the library does not know it yet, the result is PTX of the newest one before it,
    /// which every later GPU can run.
    pub fn compile(&self, program: &Program, architecture: Architecture) -> Result<Code, String> {
        let known = self.architectures()?;
        if known.contains(&architecture) {
            return self
                .output(program, &format!("--gpu-architecture=sm_{architecture}"), &self.cubin)
                .map(Code::Cubin);
        }
        let older = known.iter().copied().filter(|&known| known < architecture).max();
        let older = older.ok_or_else(|| {
            format!(
                "NVRTC compiles for compute capability {:.1} and later, and the GPU has {:.1}: use `cpu`, or an older libtorch",
                f64::from(known.iter().copied().min().unwrap_or(0)) / 10.0,
                f64::from(architecture) / 10.0,
            )
        })?;
        self.ptx(program, older)
    }

    /// Compiles a program to PTX.
    pub fn ptx(&self, program: &Program, architecture: Architecture) -> Result<Code, String> {
        self.output(program, &format!("--gpu-architecture=compute_{architecture}"), &self.ptx).map(Code::Ptx)
    }

    /// The architectures that the library compiles for.
    pub fn architectures(&self) -> Result<Vec<Architecture>, String> {
        let mut count = 0;
        // SAFETY: the first call stores a number, and the second as many numbers as that.
        unsafe {
            self.check((self.architecture_count)(&mut count), "asking for its architectures")?;
            let mut known = vec![0; usize::try_from(count).unwrap_or(0)];
            self.check((self.architectures)(known.as_mut_ptr()), "asking for its architectures")?;
            Ok(known)
        }
    }

    fn output(&self, program: &Program, architecture: &str, wanted: &Output) -> Result<Vec<u8>, String> {
        let text =
            |text: &str| CString::new(text).map_err(|_| format!("the source of {} has a NUL byte", program.name));
        let (name, source, architecture) = (text(program.name)?, text(program.source)?, text(architecture)?);
        let headers = program.headers.iter().map(|&(name, source)| Ok((text(name)?, text(source)?)));
        let headers: Vec<(CString, CString)> = headers.collect::<Result<_, String>>()?;
        let header_names: Vec<_> = headers.iter().map(|(name, _)| name.as_ptr()).collect();
        let header_sources: Vec<_> = headers.iter().map(|(_, source)| source.as_ptr()).collect();
        let options: Vec<_> = OPTIONS.iter().map(|option| option.as_ptr()).chain([architecture.as_ptr()]).collect();
        let doing = format!("compiling the kernels of {}", program.name);
        let mut handle = null_mut();
        // SAFETY: all strings are NUL-terminated and outlive the calls, and the counts are those of the arrays. The handle is destroyed
        // once, after its last use.
        unsafe {
            let count = header_names.len() as c_int;
            let (names, sources) = match count {
                0 => (null(), null()),
                _ => (header_names.as_ptr(), header_sources.as_ptr()),
            };
            self.check((self.create)(&mut handle, source.as_ptr(), name.as_ptr(), count, sources, names), &doing)?;
            let compiled = self.check((self.compile)(handle, options.len() as c_int, options.as_ptr()), &doing);
            let result = match compiled {
                Ok(()) => self.read(handle, wanted, &doing),
                Err(error) => {
                    let log = self.read(handle, &self.log, &doing).unwrap_or_default();
                    let log = String::from_utf8_lossy(&log);
                    Err(format!("{error}: {}", log.trim_end_matches(['\0', '\n'])))
                }
            };
            (self.destroy)(&mut handle);
            result
        }
    }

    /// # Safety
    /// The handle must be that of a program which has been compiled.
    unsafe fn read(&self, handle: Handle, output: &Output, doing: &str) -> Result<Vec<u8>, String> {
        let mut length = 0;
        // SAFETY: the first call stores the length of what the second one writes.
        unsafe {
            self.check((output.length)(handle, &mut length), doing)?;
            let mut bytes = vec![0u8; length];
            self.check((output.get)(handle, bytes.as_mut_ptr().cast()), doing)?;
            Ok(bytes)
        }
    }

    fn check(&self, status: Status, doing: &str) -> Result<(), String> {
        if status == 0 {
            return Ok(());
        }
        // SAFETY: the library returns a constant string for every number.
        let text = unsafe { CStr::from_ptr((self.error)(status)) };
        Err(format!("NVRTC: {doing}: {}", text.to_string_lossy()))
    }
}

/// Loads NVRTC from the folders of CUDA libraries, or by the rules of the dynamic linker. It needs a second library, which it would
/// look for by those rules alone, so this one is loaded first.
fn find() -> Result<Library, String> {
    for folder in cuda_folders() {
        for name in NAMES {
            if !folder.join(name).is_file() {
                continue;
            }
            builtins(&folder, name).iter().for_each(|path| drop(Library::open(path)));
            if let Ok(library) = Library::open(&folder.join(name)) {
                return Ok(library);
            }
        }
    }
    let mut whys = Vec::new();
    for name in NAMES {
        match Library::open(Path::new(name)) {
            Ok(library) => return Ok(library),
            Err(why) => whys.push(why),
        }
    }
    Err(format!(
        "kernels for the GPU need {}, which could not be loaded ({}): install the pip package nvidia-cuda-nvrtc of the CUDA version of \
         libtorch, or put the folder of that library into LD_LIBRARY_PATH",
        NAMES[0],
        whys.join("; ")
    ))
}

/// The paths of `libnvrtc-builtins.so.13.*` beside `libnvrtc.so.13`.
fn builtins(folder: &Path, nvrtc: &str) -> Vec<PathBuf> {
    let prefix = format!("{}.", nvrtc.replace("libnvrtc", "libnvrtc-builtins"));
    let entries = std::fs::read_dir(folder).into_iter().flatten().flatten();
    entries.filter(|entry| entry.file_name().to_string_lossy().starts_with(&prefix)).map(|entry| entry.path()).collect()
}
