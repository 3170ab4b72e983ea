"""`python -m kvferry` is the kvferry command."""

import sys

from kvferry.cli.main import main

sys.exit(main())
