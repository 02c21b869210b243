"""The replica's state machine, for simulations and tests"""
