"""The distribution rstar2-jax. gin/ travels in the wheel as rstar2_jax/configs: --gin_file works from anywhere."""

import pathlib

import setuptools

# JAX and its plugins are one release, which the plugins do not pin themselves.
ROCM = [
    f"{package}=={version}; python_version {which}"
    for version, which in (("0.10.2", "< '3.12'"), ("0.12.0", ">= '3.12'"))
    for package in ("jax-rocm7-plugin", "jax-rocm7-pjrt")
]
ROCM += ["jax==0.10.2; python_version < '3.12'", "jax>=0.12.0,<0.12.1; python_version >= '3.12'"]

CONFIGS = {
    ".".join(["rstar2_jax.configs", *folder.parts[1:]]): str(folder)
    for folder in sorted({path.parent for path in pathlib.Path("gin").rglob("*.gin")})
}

setuptools.setup(
    name="rstar2-jax",
    version="0.1.0",
    description="GRPO with Resample-on-Correct for agentic maths reasoning, in JAX",
    python_requires=">=3.11",
    packages=setuptools.find_namespace_packages(include=["rstar2_jax", "rstar2_jax.*"]) + list(CONFIGS),
    package_dir=CONFIGS,
    package_data={
        **dict.fromkeys(CONFIGS, ["*.gin"]),
        "rstar2_jax.data": ["templates/*.jinja"],
        "rstar2_jax.model": ["*.c", "*.h"],
    },
    # SGLang's own processes load this where the package is installed beside it (pip install --no-deps).
    entry_points={"sglang.srt.plugins": ["rstar2_jax = rstar2_jax.weights.sglang_loader:register"]},
    install_requires=[
        "absl-py",
        "aiohttp",
        "flax>=0.12",
        "gin-config==0.5.0",
        "jax>=0.10.2",
        "jaxtyping",
        "jinja2",
        "matplotlib",
        "numpy",
        "optax>=0.2.8",
        "orbax-checkpoint>=0.12",
        "redis>=8",
        "rich",
        "rstar2-sandbox",
        "safetensors",
        "tensorboardX",
        "tensorstore",
        "tokenizers",
    ],
    extras_require={
        "rocm": ROCM,
        "sglang": ["sglang"],
        "eval": ["math-verify[antlr4-13-2]", "sympy", "reasoning-gym", "sgl-eval"],
        "real": ["gguf", "reasoning-gym"],
        "data": ["datasets", "pyarrow"],
        "dev": [
            "beartype",
            "build",
            "chex",
            "hypothesis",
            "import-linter",
            "pyarrow",
            "pyright[nodejs]",
            "pytest",
            "pytest-xdist",
            "reasoning-gym",
            "ruff",
            "setuptools",
            "wheel",
        ],
    },
)
