"""Build with ``python setup.py build_ext --inplace``; nsq_fast must be installed: its .pxd files come with it."""

from Cython.Build import cythonize
from setuptools import Extension, setup

setup(name="counter", ext_modules=cythonize([Extension("counter", ["counter.pyx"])]))
