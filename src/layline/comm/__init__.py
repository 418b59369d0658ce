"""Communication between ranks: one small interface, real and simulated groups, and a recorder."""
