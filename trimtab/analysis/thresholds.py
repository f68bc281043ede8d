"""Every threshold of the analysis, with its source. "Ours" are those that the papers do not give.

P1  Wortsman et al. 2023, Stable and low-precision training for large-scale vision-language models, arXiv 2304.13013
P3  Wortsman et al. 2023b, Small-scale proxies for large-scale Transformer training instabilities, arXiv 2309.14322
P4  Li et al. 2022, The stability-efficiency dilemma, arXiv 2108.06084
"""

# --- Spikes: P1, appendix on the relation of RMS spikes and loss spikes. `spikes.SpikeRules` has them as options.
RMS_SPIKE = 2.3  # RMS_t
LOSS_DEVIATIONS = 3.2  # running standard deviations above the running mean
IGNORED_STEPS = 1000  # at the start of a run
SPIKE_GAP = 10  # steps; closer spikes are one event, and a loss spike needs two deviations within them
LEAD = (1, 8)  # steps from an RMS spike to the loss spike that it predicts
LOSS_WINDOW = 100  # losses in the running mean. Ours: P1 does not give it
LOSS_RATIOS = (1.1, 1.2, 1.5)  # loss over the best loss before. P4, section 3, counts the steps above 1.2

# --- Signals
CRITICAL_LOGIT = 1e4  # largest attention logit; all runs of P3 above it had diverged (section 3.4, figure 9)
LOGIT_GROWTH, LOGIT_LEAST = 10.0, 50.0  # times the early value, and a nearly one-hot softmax. Ours
# Largest early value: layer norm and weights of variance 1 / fan in give logits of variance 1 before training. Ours
LOGIT_FIRST = 10.0
LOGZ_DRIFT = 5.0  # nats. Ours: P3, section 3.1.2, describes the divergence of log Z without a number
NEAR_EPS = 10.0  # gradient RMS over Adam's eps, where eps takes 1/11 of the update (P3, section 3.4, figure 12)

# --- Losses
MARGIN = 0.1  # nats above the best loss, of a learning rate or a run that fails: a perplexity 10 % higher. Ours
DEVIATIONS = 2.0  # standard errors over seeds: a smaller difference is explained by seeds. Ours
EXPLODES = 2.0  # times the loss before training, in the first steps; and at least 1 above it. Ours
FIRST_STEPS = 20  # at least so many steps count as the first, however short the run is. Ours
# Deviations above the mean of so many losses before, of one loss that is reported. Ours: by chance as rare as P1's rule
OUTLIER, OUTLIER_WINDOW = 8.0, 20
LONG_WARMUP = 0.25  # of the run: a longer one is not recommended. Ours
LEAST_SPIKE = 1.1  # peak over the usual loss; smaller loss spikes are not reported one by one. Ours
ABSURD_LOSS = 1e30  # treated as infinite: sums of such losses overflow. Ours

# --- Forecasts. Set on the half "set" of bench/forecasts.py, which prints the first four; docs/log.md has the others.
SLOPE, SLOPE_SPREAD = -0.28, 0.17  # powers of ten of the edge of stability per power of ten of the size
GAP, GAP_SPREAD = 0.35, 0.6  # powers of ten from the best learning rate to the edge; weak, for grids without a failure
EDGE_SPREAD = 0.1  # powers of ten: seeds, and what a grid of half decades leaves open
SPREAD_PER_DECADE = 0.1  # powers of ten of the edge per power of ten of the size: the trend need not be a line
EDGE_WEIGHT = 0.7  # of the edge of stability, against the attention logits
FIRM = 0.8  # probability from which a verdict is "fails", or for its opposite "holds". Ours
HORIZON = 1.4  # powers of ten beyond the largest size; bench/forecasts.py tests up to 1.3
FEWEST_SIZES = 3  # for a fit of a signal. Ours: two sizes leave no residual
