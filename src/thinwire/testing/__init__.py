"""The laws of Thinwire, for your own piece: `thinwire.testing.check(piece)`. No pytest is needed.

A piece promises what its protocol says and what it declares. `check` tries all of that: a codec by drawn and hostile input (law 8), an
outer step by itself, an exchange among replicas in threads, and each of them in a strategy, on a toy model in threads: replicas
agree bit for bit (1), a refused round changes nothing (3), predicted bytes are counted bytes (5), saved and resumed is
never stopped (6), and the order of arrival changes nothing (7).
"""

from thinwire.testing.check import Checked, check
from thinwire.testing.codecs import CLAIMS, BrokenLawError

__all__ = ["CLAIMS", "BrokenLawError", "Checked", "check"]
