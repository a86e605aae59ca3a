//! What the fuzzer has found, as an ordinary test: the committed corpus of every target through its properties.

use std::{fs, path::Path};

#[path = "../../fuzz/properties/address.rs"]
mod address;
#[path = "../../fuzz/properties/gcra.rs"]
mod gcra;
#[path = "../../fuzz/properties/parse.rs"]
mod parse;

type Property = fn(&[u8]);

const TARGETS: [(&str, Property); 3] = [("address", address::check), ("gcra", gcra::check), ("parse", parse::check)];

fn fuzz() -> &'static Path {
    Path::new(concat!(env!("CARGO_MANIFEST_DIR"), "/../fuzz"))
}

fn names_in(folder: &Path) -> Vec<String> {
    let entries = fs::read_dir(folder).unwrap_or_else(|error| panic!("list {}: {error}", folder.display()));
    let mut names: Vec<_> =
        entries.map(|entry| entry.expect("list a folder").file_name().to_string_lossy().into_owned()).collect();
    names.sort();
    names
}

#[test]
fn the_corpus_keeps_every_property() {
    for (target, check) in TARGETS {
        let folder = fuzz().join("corpus").join(target);
        let names = names_in(&folder);
        assert!(!names.is_empty(), "{} is empty", folder.display());
        for name in names {
            let path = folder.join(&name);
            let input = fs::read(&path).unwrap_or_else(|error| panic!("read {}: {error}", path.display()));
            // The test runner shows it when the property panics.
            println!("{}", path.display());
            check(&input);
        }
    }
}

#[test]
fn every_target_has_its_corpus_here() {
    let targets = TARGETS.map(|(target, _)| target.to_owned());
    assert_eq!(names_in(&fuzz().join("corpus")), targets);
    assert_eq!(names_in(&fuzz().join("fuzz_targets")), targets.map(|target| format!("{target}.rs")));
}
