// The extension module: operator schemas for torch, and for Python the registry, the choice of
// back-end and the facts of the build.
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>
#include <torch/library.h>

#include "torch/backend.h"
#include "torch/decode_options.h"
#include "torch/options.h"

TORCH_LIBRARY(neginf, m) {
  m.def("forward(Tensor q, Tensor k, Tensor v, " NEGINF_OPTIONS_SCHEMA
        ") -> (Tensor out, Tensor lse)");
  m.def(
      "backward(Tensor? dout, Tensor? dlse, Tensor q, Tensor k, Tensor v, Tensor out, Tensor "
      "lse, " NEGINF_OPTIONS_SCHEMA ") -> (Tensor dq, Tensor dk, Tensor dv, Tensor dsink)");
  m.def("check_decode(Tensor q, Tensor k_cache, Tensor v_cache, " NEGINF_DECODE_SCHEMA
        ", Tensor? out) -> ()");
  m.def("decode(Tensor q, Tensor k_cache, Tensor v_cache, " NEGINF_DECODE_SCHEMA
        ") -> (Tensor out, Tensor lse)");
  m.def("decode_out(Tensor q, Tensor k_cache, Tensor v_cache, " NEGINF_DECODE_SCHEMA
        ", Tensor(a!) out) -> Tensor lse");
  m.def(
      "append(Tensor q, Tensor k, Tensor v, Tensor(a!) k_cache, Tensor(b!) v_cache, "
      "Tensor cache_seqlens, Tensor? page_table, Tensor? cache_batch_idx, Tensor? cu_seqlens_q, "
      "Tensor? cu_seqlens_k_new, Tensor? rotary_cos, Tensor? rotary_sin, Tensor? rotary_seqlens, "
      "bool rotary_interleaved, bool advances_q) -> (Tensor rotated_q, Tensor seqlens)");
  m.def(
      "combine(Tensor out_partial, Tensor lse_partial, ScalarType? out_dtype) "
      "-> (Tensor out, Tensor lse)");
  m.def("combine_out(Tensor out_partial, Tensor lse_partial, Tensor(a!) out) -> Tensor lse");
  m.def(
      "combine_backward(Tensor? dout, Tensor? dlse, Tensor out_partial, Tensor lse_partial) "
      "-> (Tensor dout_partial, Tensor dlse_partial)");
  m.def("merge(Tensor[] outs, Tensor[] lses, ScalarType? out_dtype) -> (Tensor out, Tensor lse)");
  m.def(
      "merge_backward(Tensor? dout, Tensor? dlse, Tensor[] outs, Tensor[] lses) "
      "-> (Tensor douts, Tensor dlses)");
}

PYBIND11_MODULE(_C, m) {
  m.def(
      "kernels",
      [] {
        std::vector<std::tuple<std::string, std::string, std::string, int>> kernels;
        for (const neginf::Kernel& kernel : neginf::built_kernels()) {
          kernels.emplace_back(name(kernel.operation), name(kernel.arch), name(kernel.dtype),
                               kernel.head_dim);
        }
        return kernels;
      },
      "Every kernel in this build as (operation, arch, dtype, largest head_dim).");
  m.attr("ANY_HEAD_DIM") = neginf::kAnyHeadDim;
  m.def("set_backend", &neginf::set_backend, pybind11::arg("backend").none(true),
        "Forces one back-end for the process; None returns to the automatic choice.");
  m.def("get_backend", &neginf::get_backend, "The forced back-end, or None.");
  m.def(
      "build_info",
      [] {
        return std::map<std::string, std::string>{
            {"version", NEGINF_VERSION},         {"torch", NEGINF_BUILD_TORCH},
            {"cuda", NEGINF_BUILD_CUDA},         {"cutlass", NEGINF_BUILD_CUTLASS},
            {"backends", NEGINF_BUILD_BACKENDS},
        };
      },
      "What this extension was built with.");
}
