"""Sizes, counts and times with units."""

from __future__ import annotations

import pytest

from thinwire.comm.quantities import count, nbytes, seconds
from thinwire.errors import ConfigurationError

NBYTES = "7=7 3b=3 3kB=3000 3MB=3000000 1.5GB=1500000000 3TB=3000000000000 3KiB=3072 3MiB=3145728 3GiB=3221225472 3TiB=3298534883328"
COUNT = "1=1 3k=3000 1.5M=1500000 3B=3000000000 3T=3000000000000"
SECONDS = "0s=0 250us=250e-6 1.5ms=1.5e-3 3s=3 90min=5400 1H=3600 3d=259200"


@pytest.mark.parametrize(
    ("read", "pairs"), [(nbytes, NBYTES), (count, COUNT), (seconds, SECONDS)], ids=["nbytes", "count", "seconds"]
)
def test_every_unit_has_its_worth(read, pairs):
    for text, worth in (pair.split("=") for pair in pairs.split()):
        assert read(text) == read(f" {text} ") == pytest.approx(float(worth), rel=1e-12), text


def test_a_number_may_stand_apart_from_its_unit_and_a_size_may_be_one():
    assert (nbytes("2 GiB"), nbytes(7), seconds("3 min"), seconds("1e30s")) == (1 << 31, 7, 180, 1e30)


@pytest.mark.parametrize("wrong", ["", "12", "s", "3 fortnights", "-1h", "nan", "nan s", "1e300s"])
def test_what_is_no_time_is_refused(wrong):
    with pytest.raises(ConfigurationError, match="a time"):
        seconds(wrong)


def test_sizes_and_counts_of_less_than_one_are_refused():
    for read in (nbytes, count):
        with pytest.raises(ConfigurationError, match="of at least 1 is needed"):
            read("0.5")
