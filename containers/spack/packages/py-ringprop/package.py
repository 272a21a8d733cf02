from spack.package import *


class PyRingprop(PythonPackage):
    """Neural networks in NumPy, trained on many ranks over MPI with hand-written collectives.

    Built from a checkout: spack dev-build py-ringprop@0.2.0
    """

    version("0.2.0")

    depends_on("python@3.11:", type=("build", "run"))
    depends_on("py-setuptools@68:", type="build")
    depends_on("py-numpy@1.26:", type=("build", "run"))
    depends_on("py-mpi4py@4.0:", type=("build", "run"))
    depends_on("py-matplotlib@3.7:", type=("build", "run"))
    depends_on("pil@9.1:", type=("build", "run"))
    depends_on("py-threadpoolctl@3.2:", type=("build", "run"))
    depends_on("mpi", type="run")
