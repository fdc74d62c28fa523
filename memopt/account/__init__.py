"""What a step holds beside its activations: optimiser state, its temporaries, the whole account."""
