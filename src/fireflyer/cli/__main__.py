from fireflyer.cli import main

main()
