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
LOGZ_DRIFT = 5.0  # nats. Ours: P3, section 3.1.2, describes the divergence of log Z without a number
NEAR_EPS = 10.0  # gradient RMS over Adam's eps, where eps takes 1/11 of the update (P3, section 3.4, figure 12)

# --- Losses
FAILS = 0.1  # of the improvement by training that a diverging learning rate loses. Ours: see measure.py
ENDS_ABOVE = 1.2  # final over best loss, of a run that diverges. Ours
LEAST_SPIKE = 1.1  # peak over the usual loss; smaller loss spikes are not reported one by one. Ours
ABSURD_LOSS = 1e30  # treated as infinite: sums of such losses overflow. Ours

# --- Forecasts
FEWEST_SIZES = 3  # for a forecast. Ours: two sizes leave no residual
HORIZON = 4.0  # powers of ten beyond the largest size. Ours
