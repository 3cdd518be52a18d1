#!/usr/bin/env bash
# Writes the Rust declarations of the header, which needs no change for it. gatedelta-sys/src/bindings.rs is the output:
#     examples/rust/bindgen.sh > examples/rust/gatedelta-sys/src/bindings.rs
set -euo pipefail
cd "$(dirname "$0")/../.."
exec bindgen include/gatedelta/gatedelta.h --allowlist-function 'gd_.*' --allowlist-type 'gd_.*' \
  --allowlist-var 'GD_.*' --size_t-is-usize --default-enum-style consts \
  --no-prepend-enum-name --with-derive-default --no-layout-tests --use-core --ctypes-prefix core::ffi
