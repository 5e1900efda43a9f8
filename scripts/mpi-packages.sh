#!/usr/bin/env bash
# Checks what the feature `mpi` needs beyond the rest: an MPI library with its compiler wrapper and mpirun, and libclang, with which
# its bindings are made. Installs what is missing where it may (root, with apt); otherwise it says what to install.
set -euo pipefail

# libclang-cpp is another library.
missing() {
    command -v mpicc >/dev/null 2>&1 || echo libopenmpi-dev
    command -v mpirun >/dev/null 2>&1 || echo openmpi-bin
    if [ -z "${LIBCLANG_PATH:-}" ] && ! ldconfig -p | grep -q 'libclang[-.0-9]*\.so' && ! compgen -G '/usr/lib*/llvm*/lib*/libclang.so*' >/dev/null && ! compgen -G '/usr/lib*/llvm*/lib*/libclang-[0-9]*.so*' >/dev/null; then
        echo libclang-dev
    fi
}

mapfile -t packages < <(missing)
[ "${#packages[@]}" -gt 0 ] || exit 0
if [ "$(id -u)" = 0 ] && command -v apt-get >/dev/null 2>&1; then
    echo "mpi: installing ${packages[*]}"
    apt-get update -qq
    DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends "${packages[@]}" >/dev/null
    mapfile -t packages < <(missing)
    [ "${#packages[@]}" -gt 0 ] || exit 0
fi
cat >&2 <<TEXT
mpi: missing on this machine, by the names of Debian's and Ubuntu's packages: ${packages[*]}
     install them (Fedora: openmpi-devel and clang-devel, then \`module load mpi/openmpi-x86_64\`); on a cluster, load the module
     of its MPI library, and set LIBCLANG_PATH to the folder of libclang.so.
TEXT
exit 1
