import sys

from forecasts._cli import main

sys.exit(main())
