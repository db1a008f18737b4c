"""What a trained model shows when it is looked at from inside."""
