"""`python -m thinwire` is the `thinwire` command."""

import sys

from thinwire.app.cli import main

sys.exit(main())
