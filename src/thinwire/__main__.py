"""`python -m thinwire` is the `thinwire` command."""

import sys

from thinwire.cli import main

sys.exit(main())
