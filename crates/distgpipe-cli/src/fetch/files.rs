//! Archives and copies. Archives are untrusted: entries stay inside the target directory whatever their names, and links are left
//! out.

use anyhow::{bail, Context};
use flate2::read::GzDecoder;
use std::fs::{self, File};
use std::io::{Read, Seek};
use std::path::{Component, Path, PathBuf};

/// The most bytes that an archive may unpack to; all data sets here are smaller.
const UNPACKED_BYTES_MAX: u64 = 16 << 30;

/// A temporary directory inside another one, removed on drop.
pub struct Scratch(PathBuf);

impl Scratch {
    /// Creates it inside `directory`, so that files can be moved there without copying.
    pub fn new(directory: &Path) -> anyhow::Result<Self> {
        let path = directory.join(format!(".getting-{}", std::process::id()));
        let _ = fs::remove_dir_all(&path);
        fs::create_dir_all(&path).with_context(|| format!("creating {}", path.display()))?;
        Ok(Scratch(path))
    }

    pub fn path(&self) -> &Path {
        &self.0
    }

    /// Creates an empty directory in it.
    pub fn subdirectory(&self, name: &str) -> anyhow::Result<PathBuf> {
        let path = self.0.join(name);
        let _ = fs::remove_dir_all(&path);
        fs::create_dir_all(&path)?;
        Ok(path)
    }
}

impl Drop for Scratch {
    fn drop(&mut self) {
        let _ = fs::remove_dir_all(&self.0);
    }
}

/// Writes a file, and syncs it to disk.
pub fn write(mut from: impl Read, to: &Path) -> anyhow::Result<()> {
    let mut file = File::create(to).with_context(|| format!("creating {}", to.display()))?;
    std::io::copy(&mut from, &mut file)?;
    Ok(file.sync_all()?)
}

/// Unpacks a `.tar.gz` or `.zip` archive into a directory, without its top-level directory.
pub fn unpack(archive: &Path, into: &Path, folder: Option<&str>) -> anyhow::Result<()> {
    let mut file = File::open(archive)?;
    let mut start = [0; 4];
    let known = file.read_exact(&mut start).map(|()| start);
    file.rewind()?;
    let mut left = UNPACKED_BYTES_MAX;
    let mut put = |name: &Path, from: &mut dyn Read| -> anyhow::Result<()> {
        let Some(path) = inside(into, name, folder) else { return Ok(()) };
        fs::create_dir_all(path.parent().unwrap_or(into))?;
        left -= std::io::copy(&mut from.take(left), &mut File::create(&path)?)?;
        if left == 0 {
            bail!("expected less than {UNPACKED_BYTES_MAX} bytes, got more: check that this is the right archive");
        }
        Ok(())
    };
    match known {
        Ok([0x1f, 0x8b, ..]) => {
            for entry in tar::Archive::new(GzDecoder::new(file)).entries()? {
                let mut entry = entry?;
                if entry.header().entry_type().is_file() {
                    let name = entry.path()?.into_owned();
                    put(&name, &mut entry)?;
                }
            }
        }
        Ok([b'P', b'K', ..]) => {
            let mut zip = zip::ZipArchive::new(file)?;
            for i in 0..zip.len() {
                let mut entry = zip.by_index(i)?;
                let name = PathBuf::from(entry.name());
                if entry.is_file() {
                    put(&name, &mut entry)?;
                }
            }
        }
        _ => bail!("expected a .tar.gz or a .zip"),
    }
    Ok(())
}

/// The path of an entry: inside `into`, without the top-level directory; `None` for names that lead elsewhere.
fn inside(into: &Path, name: &Path, folder: Option<&str>) -> Option<PathBuf> {
    let mut parts: Vec<&std::ffi::OsStr> = Vec::new();
    for part in name.components() {
        match part {
            Component::Normal(part) => parts.push(part),
            Component::CurDir => {}
            _ => return None,
        }
    }
    // The files of an npm package are in `package`.
    if parts.len() > 1 && parts[0] == folder.unwrap_or("package") {
        parts.remove(0);
    }
    (!parts.is_empty()).then(|| parts.iter().fold(into.to_owned(), |path, part| path.join(part)))
}

/// Copies a file or a directory.
pub fn copy_tree(from: &Path, to: &Path) -> anyhow::Result<()> {
    if from.is_dir() {
        fs::create_dir_all(to)?;
        for entry in fs::read_dir(from)? {
            let entry = entry?;
            copy_tree(&entry.path(), &to.join(entry.file_name()))?;
        }
        return Ok(());
    }
    let partial = to.with_extension("partial");
    fs::copy(from, &partial).with_context(|| format!("copying {}", from.display()))?;
    Ok(fs::rename(&partial, to)?)
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::io::Write;

    #[test]
    fn entries_stay_inside() {
        let at = |name: &str| inside(Path::new("/into"), Path::new(name), Some("cifar"));
        assert_eq!(at("cifar/a.bin"), Some("/into/a.bin".into()));
        assert_eq!(at("./cifar/b/a.bin"), Some("/into/b/a.bin".into()));
        assert_eq!(at("a.bin"), Some("/into/a.bin".into()));
        for name in ["../a", "cifar/../../a", "/etc/passwd", "", "."] {
            assert_eq!(at(name), None, "{name}");
        }
    }

    #[test]
    fn archives_are_unpacked_without_top_level_directory_and_links() {
        let root = std::env::temp_dir().join(format!("distgpipe-{}-unpack", std::process::id()));
        let scratch = {
            fs::create_dir_all(&root).unwrap();
            Scratch::new(&root).unwrap()
        };
        let (tar_gz, zipped) = (root.join("a.tar.gz"), root.join("a.zip"));
        let mut tar =
            tar::Builder::new(flate2::write::GzEncoder::new(File::create(&tar_gz).unwrap(), Default::default()));
        let mut header = tar::Header::new_gnu();
        header.set_size(2);
        tar.append_data(&mut header, "set/b/x.txt", &b"hi"[..]).unwrap();
        header.set_entry_type(tar::EntryType::Symlink);
        header.set_size(0);
        tar.append_link(&mut header, "set/link", "/etc/passwd").unwrap();
        tar.into_inner().unwrap().finish().unwrap();
        let mut zip = zip::ZipWriter::new(File::create(&zipped).unwrap());
        zip.start_file("set/b/x.txt", Default::default()).unwrap();
        zip.write_all(b"hi").unwrap();
        zip.start_file("../outside.txt", Default::default()).unwrap();
        zip.finish().unwrap();
        for archive in [&tar_gz, &zipped] {
            let into = scratch.subdirectory("raw").unwrap();
            unpack(archive, &into, Some("set")).unwrap();
            assert_eq!(fs::read(into.join("b/x.txt")).unwrap(), b"hi");
            assert_eq!(fs::read_dir(&into).unwrap().count(), 1, "{}", archive.display());
            fs::write(archive, &fs::read(archive).unwrap()[..60]).unwrap();
            assert!(unpack(archive, &into, Some("set")).is_err());
        }
        let ours = scratch.path().to_owned();
        drop(scratch);
        assert!(!ours.exists());
        fs::remove_dir_all(root).unwrap();
    }
}
