#!/usr/bin/env bash
# Makes the packages of all three crates as `cargo publish` would, checks what is inside, and compiles the command from the packages alone
# (`cargo check`: build scripts run, the C++ shim is compiled, nothing is linked). Needs libtorch, as every build does.
# The packages are left in target/packaging/package/, and unpacked in target/packaging/unpacked/.
# usage: scripts/package.sh [--verify | --unpack-only]
#   --verify        also builds and links each package by itself, as `cargo publish` does: some ten minutes, for a release. The packages
#                   depend on each other and are on no registry yet; cargo 1.90 or later lends them to each other.
#   --unpack-only   makes and unpacks the packages and compiles nothing
set -euo pipefail
cd "$(dirname "$0")/.."

version=$(sed -n 's/^version = "\(.*\)"/\1/p' Cargo.toml)
# crates.io takes no more than this.
bytes_max=$((10 * 1024 * 1024))
packages=$PWD/target/packaging/package
unpacked=$PWD/target/packaging/unpacked

wrong() {
    echo "package $1: $2" >&2
    exit 1
}

verify=--no-verify
[ "${1:-}" != --verify ] || verify=
cargo package --workspace --locked --allow-dirty $verify --target-dir target/packaging

rm -rf "$unpacked"
mkdir -p "$unpacked"
for name in distgpipe-core distgpipe distgpipe-cli; do
    package=$packages/$name-$version.crate
    bytes=$(stat --format %s "$package")
    ((bytes <= bytes_max)) || wrong "$name" "expected at most $bytes_max bytes, got $bytes: exclude files in its Cargo.toml"
    # Files in packages are all of the year 2006, so that cargo would not see a change.
    tar --extract --touch --gzip --file "$package" --directory "$unpacked"
    expected=(LICENSE-APACHE LICENSE-MIT README.md)
    case $name in
        distgpipe) expected+=(data/digits.bin data/README.md) ;;
        distgpipe-cli) mapfile -t -O ${#expected[@]} expected < <(cd crates/distgpipe-cli && ls recipes/*.toml template/*) ;;
    esac
    for file in "${expected[@]}"; do
        [ -s "$unpacked/$name-$version/$file" ] || wrong "$name" "expected it to contain $file, but it does not"
    done
    echo "package $name: $(find "$unpacked/$name-$version" -type f | wc -l) files, $bytes bytes"
done

# A workspace of the unpacked packages alone: they take each other where a registry would serve them, all else as Cargo.lock has it, and
# are built by our profile, so that dependencies built for this repository need not be built again.
cp Cargo.lock "$unpacked/"
{
    printf '[workspace]\nresolver = "2"\nmembers = ["*"]\n\n[patch.crates-io]\n'
    printf '%s = { path = "%s" }\n' distgpipe-core "distgpipe-core-$version" distgpipe "distgpipe-$version"
    printf '\n'
    sed -n '/^\[profile.dev\]/,/^$/p' Cargo.toml
} >"$unpacked/Cargo.toml"

[ "${1:-}" != --unpack-only ] || exit 0
target=$(realpath --canonicalize-missing "${CARGO_TARGET_DIR:-target}")
cd "$unpacked"
cargo check --locked -p distgpipe-cli --target-dir "$target"
