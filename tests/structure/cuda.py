#!/usr/bin/python3
# SPDX-License-Identifier: Apache-2.0
"""Our declarations of CUDA (tensor/cuda_interface.h) are those of NVIDIA's headers, of every release that is found.

The declarations of the checks on a GPU (tests/gpu/libcuda.h) are compared as well, and the kernels of these checks
(tests/gpu/kernels.ptx) are assembled where there is NVIDIA's ptxas.

A program in C++ includes both and compares each function's parameters, each number and the layout of structs; it is
only compiled. Headers are looked for in the folders of CUDA toolkits, and in what TENSORLANE_CUDA_INCLUDE names
(folders with colons between them), such as those of the PyPI packages nvidia-cuda-runtime-cu11 and -cu12.
"""
import glob
import os
import pathlib
import re
import shutil
import subprocess

import source

HEADER = "tensor/cuda_interface.h"
KERNELS = "tests/gpu/kernels.ptx"
PLACES = ["/usr/local/cuda*/include", "/opt/cuda*/include", "/usr/include", "/usr/local/include"]

# Our name of a number, and theirs.
NUMBERS = {
    "TL_CUDA_OK": ["cudaSuccess", "CUDA_SUCCESS"],
    "TL_CUDA_INVALID_VALUE": ["cudaErrorInvalidValue", "CUDA_ERROR_INVALID_VALUE"],
    "TL_CUDA_NO_MEMORY": ["cudaErrorMemoryAllocation", "CUDA_ERROR_OUT_OF_MEMORY"],
    "TL_CUDA_UNLOADING": ["cudaErrorCudartUnloading", "CUDA_ERROR_DEINITIALIZED"],
    "TL_CUDA_TOO_OLD": ["cudaErrorInsufficientDriver"],
    "TL_CUDA_NO_DEVICE": ["cudaErrorNoDevice"],
    "TL_CUDA_INVALID_CONTEXT": ["CUDA_ERROR_INVALID_CONTEXT"],
    "TL_CUDA_INVALID_HANDLE": ["CUDA_ERROR_INVALID_HANDLE", "cudaErrorInvalidResourceHandle"],
    "TL_CUDA_NOT_READY": ["cudaErrorNotReady", "CUDA_ERROR_NOT_READY"],
    "TL_CUDA_CAPTURE_IMPLICIT": ["CUDA_ERROR_STREAM_CAPTURE_IMPLICIT"],
    "TL_CUDA_MEMORY_UNKNOWN": ["cudaMemoryTypeUnregistered"],
    "TL_CUDA_MEMORY_HOST": ["cudaMemoryTypeHost"],
    "TL_CUDA_MEMORY_DEVICE": ["cudaMemoryTypeDevice"],
    "TL_CUDA_MEMORY_MANAGED": ["cudaMemoryTypeManaged"],
    "TL_CUDA_COPY_DEFAULT": ["cudaMemcpyDefault"],
    "TL_CUDA_STREAM_NON_BLOCKING": ["cudaStreamNonBlocking"],
    "TL_CUDA_EVENT_DISABLE_TIMING": ["CU_EVENT_DISABLE_TIMING"],
    "TL_CUDA_CAPTURE_MODE_RELAXED": ["cudaStreamCaptureModeRelaxed", "CU_STREAM_CAPTURE_MODE_RELAXED"],
    "TL_CUDA_CAPTURE_NONE": ["CU_STREAM_CAPTURE_STATUS_NONE"],
    "TL_CUDA_HOST_REGISTER_PORTABLE": ["cudaHostRegisterPortable"],
    "TL_CUDA_POINTER_SYNC_MEMOPS": ["CU_POINTER_ATTRIBUTE_SYNC_MEMOPS"],
    "TL_CUDA_DEVICE_DIRECT_SUPPORTED": ["CU_DEVICE_ATTRIBUTE_GPU_DIRECT_RDMA_SUPPORTED"],
    "TL_CUDA_DEVICE_WRITES_ORDERING": ["CU_DEVICE_ATTRIBUTE_GPU_DIRECT_RDMA_WRITES_ORDERING"],
    "TL_CUDA_WRITES_ORDERED_FOR_OWNER": ["CU_GPU_DIRECT_RDMA_WRITES_ORDERING_OWNER"],
    "TL_CUDA_DEVICE_DMA_BUF_SUPPORTED": ["CU_DEVICE_ATTRIBUTE_DMA_BUF_SUPPORTED"],
    "TL_CUDA_RANGE_DMA_BUF": ["CU_MEM_RANGE_HANDLE_TYPE_DMA_BUF_FD"],
    "TL_CUDA_DEVICE_VIRTUAL_MEMORY_SUPPORTED": ["CU_DEVICE_ATTRIBUTE_VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED"],
    "TL_CUDA_DEVICE_FILES_SUPPORTED": ["CU_DEVICE_ATTRIBUTE_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR_SUPPORTED"],
    "TL_CUDA_DEVICE_DIRECT_WITH_FILES": ["CU_DEVICE_ATTRIBUTE_GPU_DIRECT_RDMA_WITH_CUDA_VMM_SUPPORTED"],
    "TL_CUDA_ALLOCATION_PINNED": ["CU_MEM_ALLOCATION_TYPE_PINNED"],
    "TL_CUDA_HANDLE_FILE": ["CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR"],
    "TL_CUDA_LOCATION_DEVICE": ["CU_MEM_LOCATION_TYPE_DEVICE"],
    "TL_CUDA_GRANULARITY_MINIMUM": ["CU_MEM_ALLOC_GRANULARITY_MINIMUM"],
    "TL_CUDA_ACCESS_READ": ["CU_MEM_ACCESS_FLAGS_PROT_READ"],
    "TL_CUDA_ACCESS_READ_WRITE": ["CU_MEM_ACCESS_FLAGS_PROT_READWRITE"],
    "TL_CUDA_CONTEXT_SYNC_MEMOPS": ["CU_CTX_SYNC_MEMOPS"],
}
# Which releases have a number, where not all do.
LATER = {"TL_CUDA_DEVICE_DMA_BUF_SUPPORTED": "CUDA_VERSION >= 11070", "TL_CUDA_RANGE_DMA_BUF": "CUDA_VERSION >= 11070",
         "TL_CUDA_CONTEXT_SYNC_MEMOPS": "CUDA_VERSION >= 12010"}
# Handles that are constants, which a compiler cannot compare: the line of cuda.h, and of our public header.
HANDLES = {
    r"define CU_STREAM_LEGACY\s+\(\(CUstream\)0x1\)": "define TL_STREAM_LEGACY 1",
    r"define CU_STREAM_PER_THREAD\s+\(\(CUstream\)0x2\)": "define TL_STREAM_PER_THREAD 2",
}
# Each form of this function, and from which release on it is used.
ENTRIES = [("tl_cuda_entry_3_fn", "cudaGetDriverEntryPoint", "CUDART_VERSION < 12000"),
           ("tl_cuda_entry_4_fn", "cudaGetDriverEntryPoint", "CUDART_VERSION >= 12000 && CUDART_VERSION < 12050"),
           ("tl_cuda_entry_version_fn", "cudaGetDriverEntryPointByVersion", "CUDART_VERSION >= 12050")]

PROGRAM = """
#include <cstddef>
#include <type_traits>
#include <cuda.h>
#include <cuda_runtime_api.h>
#include <tensorlane/tensor.h>
#include "tensor/cuda_interface.h"
#include "tests/gpu/libcuda.h"

template <class A, class B> constexpr bool is_same_kind()
{
    constexpr bool are_numbers = (std::is_integral<A>::value || std::is_enum<A>::value) &&
                                 (std::is_integral<B>::value || std::is_enum<B>::value);
    return sizeof(A) == sizeof(B) && (are_numbers || (std::is_pointer<A>::value && std::is_pointer<B>::value));
}
template <class A, class B> struct compare { static constexpr bool is_equal = false; };
template <class R, class S, class... A, class... B> struct compare<R (*)(A...), S (*)(B...)> {
    template <class... P> struct all;
    static constexpr bool parameters()
    {
        if constexpr (sizeof...(A) == sizeof...(B)) return (is_same_kind<A, B>() && ...);
        return false;
    }
    static constexpr bool is_equal = is_same_kind<R, S>() && parameters();
};
static_assert(!compare<int (*)(int), int (*)(int, int)>::is_equal, "the comparison counts");
static_assert(!compare<int (*)(int), int (*)(long)>::is_equal, "the comparison sees sizes");
static_assert(!compare<int (*)(long), int (*)(void *)>::is_equal, "the comparison sees pointers");
#define FUNCTION(name, parameters) \\
    static_assert(compare<decltype(tl_cuda::name), decltype(&::name)>::is_equal, "the parameters of " #name);
TL_CUDA_RUNTIME_FUNCTIONS(FUNCTION)
TL_CUDA_LIBCUDA_FUNCTIONS(FUNCTION)
FUNCTION(cudaGetErrorString, )
#define DIRECT_FUNCTION(name, parameters, version) \\
    static_assert(compare<decltype(tl_cuda_direct::name), decltype(&::name)>::is_equal, "the parameters of " #name);
#if CUDA_VERSION >= 11070
TL_CUDA_DIRECT_FUNCTIONS(DIRECT_FUNCTION)
#endif
#define SHARING_FUNCTION(name, parameters, version) \\
    static_assert(compare<decltype(tl_cuda_sharing::name), decltype(&::name)>::is_equal, "the parameters of " #name);
#if CUDA_VERSION >= 12010
TL_CUDA_SHARING_FUNCTIONS(SHARING_FUNCTION)
#endif
static_assert(sizeof(tl_cuda_properties) == sizeof(CUmemAllocationProp), "the properties of memory");
static_assert(offsetof(tl_cuda_properties, handle_types) == offsetof(CUmemAllocationProp, requestedHandleTypes),
              "the types of handles");
static_assert(offsetof(tl_cuda_properties, location) == offsetof(CUmemAllocationProp, location), "location");
static_assert(offsetof(tl_cuda_location, id) == offsetof(CUmemLocation, id), "the number of a device");
static_assert(offsetof(tl_cuda_properties, is_direct_capable) ==
              offsetof(CUmemAllocationProp, allocFlags.gpuDirectRDMACapable), "is_direct_capable");
static_assert(sizeof(tl_cuda_access) == sizeof(CUmemAccessDesc), "access");
static_assert(offsetof(tl_cuda_access, flags) == offsetof(CUmemAccessDesc, flags), "the flags of access");
#define CHECK_FUNCTION(name, parameters) \\
    static_assert(compare<decltype(libcuda::name), decltype(&::name)>::is_equal, "the parameters of " #name);
LIBCUDA_FUNCTIONS(CHECK_FUNCTION)
static_assert(LIBCUDA_NON_BLOCKING == CU_STREAM_NON_BLOCKING, "streams that do not block");
static_assert(LIBCUDA_NOT_READY == CUDA_ERROR_NOT_READY, "what is not ready");
static_assert(sizeof(tl_cuda_pointer) >= sizeof(cudaPointerAttributes), "space for the attributes of a pointer");
static_assert(offsetof(tl_cuda_pointer, type) == offsetof(cudaPointerAttributes, type), "type");
static_assert(offsetof(tl_cuda_pointer, device) == offsetof(cudaPointerAttributes, device), "device");
static_assert(offsetof(tl_cuda_pointer, device_pointer) == offsetof(cudaPointerAttributes, devicePointer), "pointer");
static_assert(offsetof(tl_cuda_pointer, host_pointer) == offsetof(cudaPointerAttributes, hostPointer), "host pointer");
"""


def program():
    numbers = [(f"#if {LATER[ours]}\n" if ours in LATER else "") +
               f'static_assert({ours} == {theirs}, "{ours} is {theirs}");' + ("\n#endif" if ours in LATER else "")
               for ours, names in NUMBERS.items() for theirs in names]
    entries = [f'#if {condition}\nstatic_assert(compare<{form}, decltype(&::{name})>::is_equal, "{form}");\n#endif'
               for form, name, condition in ENTRIES]
    return "\n".join([PROGRAM, *numbers, *entries, ""])


def folders():
    """Returns the folders with NVIDIA's headers, each once."""
    named = [folder for folder in os.environ.get("TENSORLANE_CUDA_INCLUDE", "").split(":") if folder]
    found = named + [folder for place in PLACES for folder in sorted(glob.glob(place))]
    return sorted({os.path.realpath(folder) for folder in found
                   if pathlib.Path(folder, "cuda_runtime_api.h").exists() and pathlib.Path(folder, "cuda.h").exists()})


def compile_with(folder):
    """Returns the compiler's complaints."""
    theirs = pathlib.Path(folder, "cuda.h").read_text(errors="replace")
    ours = source.read("include/tensorlane/tensor.h")
    for line, own in HANDLES.items():
        if not re.search(line, theirs) or own not in ours:
            return f"{own}: {line}"
    result = subprocess.run(["g++", "-std=c++17", "-fsyntax-only", "-Wno-enum-compare", "-isystem", folder,
                             "-I", source.ROOT, "-I", source.ROOT / "include", "-x", "c++", "-"],
                            input=program(), capture_output=True, text=True, check=False)
    return result.stderr if result.returncode else ""


def assemble():
    """Yields what ptxas says against the kernels, where there is one."""
    ptxas = shutil.which("ptxas") or shutil.which("ptxas", path="/usr/local/cuda/bin:/opt/cuda/bin")
    if ptxas:
        result = subprocess.run([ptxas, "--gpu-name", "sm_90", "--output-file", os.devnull, source.ROOT / KERNELS],
                                capture_output=True, text=True, check=False)
        if result.returncode:
            yield f"{KERNELS}: {result.stdout}{result.stderr}"


def main():
    text = source.read(HEADER)
    problems = [f"{HEADER}: {name} is compared with nothing"
                for name in re.findall(r"^    (TL_CUDA_\w+) = ", text, re.MULTILINE) if name not in NUMBERS]
    problems += assemble()
    headers = folders()
    if not headers and not problems:
        source.skip("there are no headers of CUDA (cuda.h, cuda_runtime_api.h)")
    problems += [f"{folder}:\n{complaint}" for folder in headers if (complaint := compile_with(folder))]
    source.finish(problems, len(headers))


if __name__ == "__main__":
    main()
