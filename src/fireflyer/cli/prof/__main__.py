"""`python -m fireflyer.cli.prof`."""

from fireflyer.cli.prof import main

main()
