//! Shared libraries that are looked for at run time: NVRTC and the CUDA driver.

use std::collections::BTreeSet;
use std::ffi::{c_void, CStr, CString};
use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};

/// A library that stays loaded until the process ends.
pub struct Library {
    handle: *mut c_void,
    name: String,
}

// SAFETY: handles of the dynamic linker may be used by every thread.
unsafe impl Send for Library {}
// SAFETY: as above; `function` only looks up.
unsafe impl Sync for Library {}

impl Library {
    /// Loads a library by its path or, without a folder, by the rules of the dynamic linker.
    pub fn open(path: &Path) -> Result<Library, String> {
        let name = path.display().to_string();
        let text = CString::new(path.as_os_str().as_bytes()).map_err(|_| format!("the path {name} has a NUL byte"))?;
        // SAFETY: dlopen gets a NUL-terminated path. The library is one of NVIDIA's, whose initializers need nothing of ours.
        let handle = unsafe { libc::dlopen(text.as_ptr(), libc::RTLD_NOW | libc::RTLD_GLOBAL) };
        if handle.is_null() {
            return Err(linker_error());
        }
        Ok(Library { handle, name })
    }

    /// The function of this name.
    ///
    /// # Safety
    /// `F` must be the type of a pointer to the function, as its library declares it.
    pub unsafe fn function<F: Copy>(&self, name: &CStr) -> Result<F, String> {
        const { assert!(size_of::<F>() == size_of::<*mut c_void>(), "a pointer to a function") };
        // SAFETY: the handle is never closed, and the name is NUL-terminated.
        let address = unsafe { libc::dlsym(self.handle, name.as_ptr()) };
        if address.is_null() {
            return Err(format!("{} has no function {}: it is too old", self.name, name.to_string_lossy()));
        }
        // SAFETY: both are pointers, and the caller promises the type.
        Ok(unsafe { std::mem::transmute_copy(&address) })
    }
}

/// The text of the dynamic linker's last error on this thread.
fn linker_error() -> String {
    // SAFETY: dlerror returns null or a string that is valid until the next call of the linker on this thread.
    unsafe {
        let why = libc::dlerror();
        if why.is_null() {
            "unknown reason".to_owned()
        } else {
            CStr::from_ptr(why).to_string_lossy().into_owned()
        }
    }
}

/// The folders that may have NVRTC, best first: those of the CUDA libraries in this process, and where the pip packages put it
/// relative to them.
///
/// ```text
/// site-packages/torch/lib/libtorch_cuda.so    site-packages/nvidia/cu13/lib/libcudart.so.13, libnvrtc.so.13
/// ```
pub fn cuda_folders() -> Vec<PathBuf> {
    let maps = std::fs::read_to_string("/proc/self/maps").unwrap_or_default();
    folders_of_mapped(&maps)
}

fn folders_of_mapped(maps: &str) -> Vec<PathBuf> {
    let mapped = maps.lines().filter_map(|line| line.find('/').map(|at| Path::new(&line[at..])));
    let is_cuda = |path: &&Path| {
        let name = path.file_name().map(|name| name.to_string_lossy()).unwrap_or_default();
        name.starts_with("libtorch_cuda.so") || name.starts_with("libcudart")
    };
    let found: BTreeSet<&Path> = mapped.filter(is_cuda).filter_map(Path::parent).collect();
    let packages = found.iter().filter_map(|folder| folder.parent()?.parent());
    let beside = packages.flat_map(|root| [root.join("nvidia/cu13/lib"), root.join("nvidia/cuda_nvrtc/lib")]);
    found.iter().map(|folder| folder.to_path_buf()).chain(beside).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn folders_come_from_the_libraries_in_memory() {
        let maps = "7f00-7f01 r--p 00000000 08:01 11 /usr/lib/libc.so.6\n\
                    7f01-7f02 r-xp 00000000 08:01 12 /opt/my env/torch/lib/libtorch_cuda.so\n\
                    7f02-7f03 r-xp 00001000 08:01 12 /opt/my env/torch/lib/libtorch_cuda.so\n\
                    7f03-7f04 rw-p 00000000 00:00 0  [heap]\n";
        let folders = folders_of_mapped(maps);
        let expected = ["/opt/my env/torch/lib", "/opt/my env/nvidia/cu13/lib", "/opt/my env/nvidia/cuda_nvrtc/lib"];
        assert_eq!(folders, expected.map(PathBuf::from));
        assert_eq!(folders_of_mapped(""), Vec::<PathBuf>::new());
    }

    #[test]
    fn what_is_missing_is_named() {
        let Err(why) = Library::open(Path::new("libdistgpipe-none.so.1")) else { panic!("there is no such library") };
        assert!(why.contains("libdistgpipe-none.so.1"), "{why}");
        let libc = Library::open(Path::new("libc.so.6")).unwrap();
        // SAFETY: the type is that of `getpid`; there is no function of the other name.
        let (getpid, none) = unsafe {
            type Getpid = unsafe extern "C" fn() -> libc::pid_t;
            (libc.function::<Getpid>(c"getpid").unwrap(), libc.function::<Getpid>(c"distgpipe_none"))
        };
        // SAFETY: `getpid` only returns a number.
        assert_eq!(unsafe { getpid() }.unsigned_abs(), std::process::id());
        let why = none.unwrap_err();
        assert!(why.contains("libc.so.6 has no function distgpipe_none"), "{why}");
    }
}
