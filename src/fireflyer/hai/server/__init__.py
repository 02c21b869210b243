"""The server: its process, HTTP routes, and the controller behind them."""
