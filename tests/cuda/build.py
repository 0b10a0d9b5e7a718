"""Builds the fake CUDA for one installed CUDA wheel of torch: the libraries that torch's own ask for, by their names.

Every function that torch's libraries import is counted with nm. What lib/*.c has is real; calls to BLAS and DNN succeed
and do nothing; every other function aborts with its name. torch itself is not changed.

    python tests/cuda/build.py FOLDER HEADERS     # the interpreter of the environment that has the CUDA wheel

HEADERS: where `pip install --target HEADERS nvidia-cuda-runtime nvidia-cuda-crt` put CUDA's headers.
"""

from __future__ import annotations

import argparse
import re
import shutil
import subprocess
import tempfile
from collections import defaultdict
from concurrent.futures import ThreadPoolExecutor
from importlib.metadata import distribution
from pathlib import Path

HERE = Path(__file__).parent / "lib"
SOURCES = {
    "libcudart": ["queue.c", "runtime.c"],
    "libcuda": ["driver.c"],
    "libnvidia-ml": ["nvml.c"],
    "libnccl": ["nccl.c"],
    "libcublas": ["cublas.c"],
    "libcublasLt": ["cublaslt.c"],
    "libcudnn": ["cudnn.c"],
    "libcupti": ["cupti.c"],
}
ANSWERS = {"libcublas": 0, "libcublasLt": 0, "libcudnn": 0, "libnvidia-ml": 3, "libcupti": 27}
"""What a function without behaviour returns: BLAS and DNN success, NVML and CUPTI "not supported". All others abort."""
BY_PREFIX = {"nccl": "libnccl", "cusparseLt": "libcusparseLt", "cuFile": "libcufile", "nvshmem": "libnvshmem_host"}
BY_NODE = {"NVSHMEM": "libnvshmem_host"}
OPENED_BY_NAME = {"libnvidia-ml.so.1", "libcuda.so.1"}
NVIDIA = re.compile(r"lib(cu|nv|nccl)")


def run(*command: object) -> str:
    done = subprocess.run([str(part) for part in command], capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(f"{command[0]} failed: {' '.join(map(str, command))}\n{done.stderr}")
    return done.stdout


def torch_libraries() -> list[Path]:
    libraries = sorted(Path(str(distribution("torch").locate_file("torch/lib"))).glob("lib*.so*"))
    if not any(library.name == "libtorch_cuda.so" for library in libraries):
        raise SystemExit("this environment has a CPU build of torch; `make cuda` installs the CUDA wheel")
    return libraries


def wanted_version(package: str) -> tuple[int, ...]:
    """The version of an NVIDIA package that torch asks for: `nvidia-cudnn` 9.20.0.48 as (9, 20, 0, 48)."""
    for line in distribution("torch").requires or []:
        found = re.match(rf"{package}\S*?==([\d.]+)", line)
        if found:
            return tuple(int(part) for part in found[1].split("."))
    raise SystemExit(f"torch names no {package} that it needs")


def imports(libraries: list[Path]) -> tuple[dict[str, set[str]], dict[str, str], set[str]]:
    """The functions that torch imports from each NVIDIA library, each library's version node, and the files' names."""
    functions: dict[str, set[str]] = defaultdict(set)
    nodes: dict[str, str] = {}
    files = set(OPENED_BY_NAME)
    own = {library.name for library in libraries}
    for library in libraries:
        needed = re.findall(r"NEEDED.*\[(.+)\]", run("readelf", "-d", library))
        files |= {name for name in needed if NVIDIA.match(name) and name not in own}
        for name, node in re.findall(r" [Uw] (\w+)(?:@+(\S+))?$", run("nm", "-D", "--undefined-only", library), re.M):
            home = BY_NODE.get(node) or (node.split(".")[0] if NVIDIA.match(node) else None)
            if home:
                nodes[home] = node
            elif not node:
                home = next((value for prefix, value in BY_PREFIX.items() if name.startswith(prefix)), None)
                home = home or ("libcuda" if re.match(r"cu[A-Z]", name) else None)
            if home:
                functions[home].add(name)
    for library in libraries:
        if library.name == "libc10_cuda.so":  # what it asks the driver and NVML for at run time
            text = library.read_bytes()
            functions["libcuda"] |= {m.decode() for m in re.findall(rb"\0(cu[A-Z]\w{4,60})(?=\0)", text)}
            functions["libnvidia-ml"] |= {m.decode() for m in re.findall(rb"\0(nvml[A-Z]\w{4,60})(?=\0)", text)}
    return functions, nodes, files


def compile_library(name: str, functions: set[str], node: str, folder: Path, flags: list[str]) -> str:
    """Build one library, NAME as `libcudart.so.13`; with all functions that torch imports. Returns a line of counts."""
    short = name.split(".")[0]
    with tempfile.TemporaryDirectory() as scratch:
        objects = [Path(scratch) / f"{source}.o" for source in SOURCES.get(short, [])]
        for source, target in zip(SOURCES.get(short, []), objects, strict=True):
            run("cc", *flags, "-c", HERE / source, "-o", target)
        real = set(re.findall(r" [TDB] (\w+)$", "".join(run("nm", target) for target in objects), re.M))
        missing = sorted(functions - real)
        abort = 'fake_die("%s has no behaviour here", __func__);'
        body = f"return {ANSWERS[short]};" if short in ANSWERS else abort
        stubs = Path(scratch) / "stubs.c"
        stubs.write_text('#include "fake.h"\n' + "".join(f"long {each}(void) {{ {body} }}\n" for each in missing))
        script = Path(scratch) / "nodes"
        script.write_text(f"{node} {{ global: *; }};" if node else "{ global: *; };")
        others = [] if short == "libcudart" else [f"-L{folder}", "-l:libcudart.so"]
        run("cc", *flags, "-shared", f"-Wl,-soname,{name}", f"-Wl,--version-script,{script}", stubs, *objects, *others,
            "-lpthread", "-ldl", "-lm", "-lrt", "-o", folder / name)  # fmt: skip
    kind = f"do nothing and return {ANSWERS[short]}" if short in ANSWERS else "abort with their name"
    return (
        f"{name:24} {len(functions & real):4} of {len(functions):4} functions have behaviour, {len(missing):4} {kind}"
    )


def build(folder: Path, headers: Path) -> list[str]:
    functions, nodes, files = imports(torch_libraries())
    folder.mkdir(parents=True, exist_ok=True)
    includes = sorted(headers.glob("nvidia/*/include"))
    if not includes:
        wanted = f"pip install --target {headers} nvidia-cuda-runtime nvidia-cuda-crt"
        raise SystemExit(f"{headers} has no nvidia/*/include: {wanted}")
    cudnn, nccl = wanted_version("nvidia-cudnn"), wanted_version("nvidia-nccl")
    flags = ["-std=gnu11", "-O2", "-g", "-fPIC", "-w", f"-I{HERE}", *(f"-I{include}" for include in includes)]
    flags += [f"-DCUDNN_BUILT={cudnn[0] * 10000 + cudnn[1] * 100 + cudnn[2]}"]
    flags += [f"-DNCCL_BUILT={nccl[0] * 10000 + nccl[1] * 100 + nccl[2]}"]
    first = next(name for name in files if name.startswith("libcudart."))
    lines = [compile_library(first, functions["libcudart"], nodes.get("libcudart", ""), folder, flags)]
    (folder / "libcudart.so").unlink(missing_ok=True)
    (folder / "libcudart.so").symlink_to(first)
    with ThreadPoolExecutor() as pool:
        operators = pool.submit(compile_operators, folder)
        for name in sorted(files - {first}):
            short = name.split(".")[0]
            lines.append(compile_library(name, functions[short], nodes.get(short, ""), folder, flags))
        operators.result()
    write_package(folder)
    return lines


def compile_operators(folder: Path) -> None:
    torch = Path(str(distribution("torch").locate_file("torch")))
    includes = [f"-I{torch}/include", f"-I{torch}/include/torch/csrc/api/include", f"-I{HERE}"]
    linked = [f"-L{torch}/lib", "-ltorch", "-ltorch_cpu", "-lc10", f"-L{folder}", "-l:libcudart.so"]
    flags = ["-std=c++20", "-O1", "-fPIC", "-shared", "-w", *includes]
    run("c++", *flags, HERE / "operators.cpp", *linked, "-o", folder / "operators.so")


def write_package(folder: Path) -> None:
    """A package that torch itself loads at the end of its import: an entry point of the group `torch.backends`."""
    site = folder / "site"
    facts = site / "fake_cuda-1.dist-info"
    facts.mkdir(parents=True, exist_ok=True)
    (facts / "METADATA").write_text("Metadata-Version: 2.1\nName: fake_cuda\nVersion: 1\n")
    (facts / "entry_points.txt").write_text("[torch.backends]\nfake_cuda = fake_cuda:load\n")
    shutil.copy(HERE / "fake_cuda.py", site / "fake_cuda.py")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("headers", type=Path)
    asked = parser.parse_args()
    print("\n".join(build(asked.folder, asked.headers)))


if __name__ == "__main__":
    main()
