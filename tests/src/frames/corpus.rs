//! What fuzzing the parser has found, in files.

use std::{env, fs, path::PathBuf};

/// Frames of the committed corpus, with the names of their files.
///
/// # Panics
///
/// When the corpus cannot be read, or is empty.
pub fn parser_corpus() -> Vec<(String, Vec<u8>)> {
    // The value at run time comes first: the virtual machine has the folders of the workspace elsewhere.
    let manifest = env::var_os("CARGO_MANIFEST_DIR").map_or_else(|| env!("CARGO_MANIFEST_DIR").into(), PathBuf::from);
    let folder = manifest.join("../fuzz/corpus/parse");
    let entries = fs::read_dir(&folder).unwrap_or_else(|error| panic!("list {}: {error}", folder.display()));
    let mut frames: Vec<_> = entries
        .map(|entry| {
            let path = entry.expect("list the corpus").path();
            let frame = fs::read(&path).unwrap_or_else(|error| panic!("read {}: {error}", path.display()));
            (path.file_name().unwrap_or_default().to_string_lossy().into_owned(), frame)
        })
        .collect();
    frames.sort();
    assert!(!frames.is_empty(), "{} has no frames", folder.display());
    frames
}
