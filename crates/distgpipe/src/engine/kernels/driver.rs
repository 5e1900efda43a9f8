//! The CUDA driver: loads compiled kernels, and launches them on streams of libtorch.

use super::library::Library;
use super::nvrtc::{Architecture, Code};
use libc::{c_char, c_int, c_uint, c_void};
use std::ffi::CStr;
use std::path::Path;
use std::ptr::null_mut;
use std::sync::OnceLock;

type Status = c_int;
type Context = *mut c_void;

/// Numbers of `CUdevice_attribute`.
const CAPABILITY_MAJOR: c_int = 75;
const CAPABILITY_MINOR: c_int = 76;

/// The functions of `libcuda.so.1`.
pub struct Driver {
    init: unsafe extern "C" fn(c_uint) -> Status,
    error: unsafe extern "C" fn(Status, *mut *const c_char) -> Status,
    device: unsafe extern "C" fn(*mut c_int, c_int) -> Status,
    attribute: unsafe extern "C" fn(*mut c_int, c_int, c_int) -> Status,
    retain: unsafe extern "C" fn(*mut Context, c_int) -> Status,
    current: unsafe extern "C" fn(*mut Context) -> Status,
    push: unsafe extern "C" fn(Context) -> Status,
    pop: unsafe extern "C" fn(*mut Context) -> Status,
    load: unsafe extern "C" fn(*mut *mut c_void, *const c_void) -> Status,
    function: unsafe extern "C" fn(*mut *mut c_void, *mut c_void, *const c_char) -> Status,
    launch: LaunchFunction,
}

type LaunchFunction = unsafe extern "C" fn(
    *mut c_void,
    c_uint,
    c_uint,
    c_uint,
    c_uint,
    c_uint,
    c_uint,
    c_uint,
    *mut c_void,
    *mut *mut c_void,
    *mut *mut c_void,
) -> Status;

/// A device with the context that libtorch uses on it.
#[derive(Clone, Copy, Debug)]
pub struct DeviceContext {
    context: Context,
    /// The compute capability of the device.
    pub architecture: Architecture,
}

/// A kernel that has been loaded into a context.
#[derive(Clone, Copy, Debug)]
pub struct Function {
    context: Context,
    handle: *mut c_void,
}

// SAFETY: the driver's handles may be used by every thread. Neither contexts nor modules are ever released.
unsafe impl Send for Function {}
// SAFETY: as above.
unsafe impl Sync for Function {}

/// How many threads a launch has.
#[derive(Clone, Copy, Debug)]
pub struct Extent {
    /// The number of blocks.
    pub blocks: u32,
    /// The number of threads in a block.
    pub threads: u32,
}

impl Driver {
    /// The driver of this machine, loaded at the first call.
    pub fn get() -> Result<&'static Driver, String> {
        static LOADED: OnceLock<Result<Driver, String>> = OnceLock::new();
        LOADED.get_or_init(Driver::load).as_ref().map_err(String::clone)
    }

    fn load() -> Result<Driver, String> {
        let library = Library::open(Path::new("libcuda.so.1"))
            .map_err(|why| format!("kernels for the GPU need libcuda.so.1 ({why}): install NVIDIA's driver"))?;
        // SAFETY: cuda.h declares the functions with the types of the fields.
        let driver = unsafe {
            Driver {
                init: library.function(c"cuInit")?,
                error: library.function(c"cuGetErrorString")?,
                device: library.function(c"cuDeviceGet")?,
                attribute: library.function(c"cuDeviceGetAttribute")?,
                retain: library.function(c"cuDevicePrimaryCtxRetain")?,
                current: library.function(c"cuCtxGetCurrent")?,
                push: library.function(c"cuCtxPushCurrent_v2")?,
                pop: library.function(c"cuCtxPopCurrent_v2")?,
                load: library.function(c"cuModuleLoadData")?,
                function: library.function(c"cuModuleGetFunction")?,
                launch: library.function(c"cuLaunchKernel")?,
            }
        };
        // SAFETY: may be called any number of times.
        driver.check(unsafe { (driver.init)(0) }, "starting CUDA")?;
        Ok(driver)
    }

    /// The primary context of a device, which is the one that libtorch uses.
    pub fn open(&self, index: c_int) -> Result<DeviceContext, String> {
        let (mut device, mut major, mut minor, mut context) = (0, 0, 0, null_mut());
        // SAFETY: each call stores one value. The context is kept until the process ends.
        unsafe {
            self.check((self.device)(&mut device, index), "opening a GPU")?;
            self.check((self.attribute)(&mut major, CAPABILITY_MAJOR, device), "asking a GPU for its architecture")?;
            self.check((self.attribute)(&mut minor, CAPABILITY_MINOR, device), "asking a GPU for its architecture")?;
            self.check((self.retain)(&mut context, device), "opening a GPU")?;
        }
        Ok(DeviceContext { context, architecture: 10 * major + minor })
    }

    /// Loads kernels of a compiled program.
    pub fn functions(
        &self,
        device: DeviceContext,
        code: &Code,
        names: &[&'static CStr],
    ) -> Result<Vec<Function>, String> {
        self.inside(device.context, || {
            let mut module = null_mut();
            // SAFETY: a cubin says how long it is, and PTX is NUL-terminated. The names are NUL-terminated.
            unsafe {
                self.check((self.load)(&mut module, code.bytes().as_ptr().cast()), "loading kernels")?;
                let one = |name: &&CStr| {
                    let mut handle = null_mut();
                    let doing = format!("looking for the kernel {}", name.to_string_lossy());
                    self.check((self.function)(&mut handle, module, name.as_ptr()), &doing)?;
                    Ok(Function { context: device.context, handle })
                };
                names.iter().map(one).collect()
            }
        })
    }

    /// Enqueues a kernel on a stream. Works while the stream is captured.
    ///
    /// # Safety
    /// `arguments` must point to one value for each parameter of the kernel, of its type. What the kernel reads and writes must stay
    /// valid until the stream has executed it. `stream` must be a stream of the function's device.
    pub unsafe fn launch(
        &self,
        function: Function,
        extent: Extent,
        stream: *mut c_void,
        arguments: &mut [*mut c_void],
    ) -> Result<(), String> {
        self.inside(function.context, || {
            // SAFETY: as the caller promises; no dynamic shared memory is asked for.
            let status = unsafe {
                (self.launch)(
                    function.handle,
                    extent.blocks,
                    1,
                    1,
                    extent.threads,
                    1,
                    1,
                    0,
                    stream,
                    arguments.as_mut_ptr(),
                    null_mut(),
                )
            };
            self.check(status, "launching a kernel")
        })
    }

    /// Calls `body` while a context is the thread's current one.
    fn inside<T>(&self, context: Context, body: impl FnOnce() -> Result<T, String>) -> Result<T, String> {
        let mut before = null_mut();
        // SAFETY: stores a handle.
        self.check(unsafe { (self.current)(&mut before) }, "asking for the context")?;
        if before == context {
            return body();
        }
        // SAFETY: the context is valid until the process ends.
        self.check(unsafe { (self.push)(context) }, "changing the context")?;
        let result = body();
        // SAFETY: what was pushed is taken back.
        self.check(unsafe { (self.pop)(&mut before) }, "changing the context")?;
        result
    }

    fn check(&self, status: Status, doing: &str) -> Result<(), String> {
        if status == 0 {
            return Ok(());
        }
        let mut text = std::ptr::null();
        // SAFETY: the driver stores a pointer to a constant string, or null for a number that it does not know.
        let text = unsafe {
            (self.error)(status, &mut text);
            if text.is_null() {
                format!("error {status}")
            } else {
                CStr::from_ptr(text).to_string_lossy().into_owned()
            }
        };
        Err(format!("CUDA: {doing}: {text}"))
    }
}
