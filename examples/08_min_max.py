"""Several replicas find a saddle point together: compressed differences converge where compressed values do not.

    python examples/08_min_max.py
    python examples/08_min_max.py --replicas 10 --numbers 25 --iterations 600

min over x, max over y of (1/M) Σ x·B_m·y + a_m·x + b_m·y + ρ/2·(|x|² − |y|²): each replica knows its own B_m, a_m, b_m.
"""

import argparse
import math

import torch
from torch import Tensor

import thinwire as tw
from thinwire.lab.methods import Extragradient, Masha1, Masha2, Saddle, nbytes_sent, saddle

RHO = 0.1


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--replicas", type=int, default=4, help="M (default: %(default)s)")
    parser.add_argument("--numbers", type=int, default=20, help="in x, and in y (default: %(default)s)")
    parser.add_argument("--iterations", type=int, default=300, help="of extragradient (default: %(default)s)")
    options = parser.parse_args()
    n, generator = options.numbers, torch.Generator().manual_seed(0)
    coupling = torch.randn(options.replicas, n, n, generator=generator) / math.sqrt(n)
    linear = torch.randn(options.replicas, 2, n, generator=generator)

    mean, own = coupling.double().mean(0), RHO * torch.eye(n).double()
    jacobian = torch.cat([torch.cat([own, mean], 1), torch.cat([-mean.T, own], 1)])
    a, b = linear.double().mean(0)
    best = torch.linalg.solve(jacobian, torch.cat([-a, b]))
    lipschitz = float(torch.linalg.matrix_norm(jacobian, 2))

    def find(method: Extragradient | Masha1 | Masha2, iterations: int) -> float:
        def replica(group: tw.Group) -> Tensor:
            m = group.rank

            def objective(x: Tensor, y: Tensor) -> Tensor:
                return x @ coupling[m] @ y + linear[m, 0] @ x + linear[m, 1] @ y + RHO / 2 * (x @ x - y @ y)

            at = Saddle(method, saddle(objective, n), torch.zeros(2 * n), group)
            for _ in range(iterations):
                at.iterate()
            return at.z

        return float((tw.run_threads(options.replicas, replica)[0].double() - best).norm() / best.norm())

    fifth, largest = tw.codecs.RandomK(0.2, tw.codecs.Identity()), tw.codecs.TopK(0.2, tw.codecs.Identity())
    variance = math.sqrt(5 / options.replicas + 1)
    methods: dict[str, Extragradient | Masha1 | Masha2] = {
        "extragradient, fp32": Extragradient(step=0.5 / lipschitz),
        "extragradient, the largest fifth": Extragradient(step=0.1 / lipschitz, codec=largest),
        "MASHA1, a random fifth": Masha1(step=0.45 / lipschitz / variance, codec=fifth),
        "MASHA2, the largest fifth": Masha2(step=0.1 / lipschitz, codec=largest),
    }
    print("method                           │ kB sent │ distance to the saddle point, of the first one")
    for name, method in methods.items():
        iterations = options.iterations * (1 if "fp32" in name else 2)
        nbytes = nbytes_sent(method, 2 * n, options.replicas, iterations)
        print(f"{name:<32} │ {nbytes / 1000:7.1f} │ {find(method, iterations):.2e}")


if __name__ == "__main__":
    main()
