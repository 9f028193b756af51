"""The optional part in C: compiled where there is a compiler, left out without complaint where there is none."""

import setuptools

FORKER = setuptools.Extension(
    "rstar2_sandbox._forker", ["rstar2_sandbox/forker.c"], extra_compile_args=["-O2"], optional=True
)

setuptools.setup(ext_modules=[FORKER])
