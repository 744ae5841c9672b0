// Form pages: a form is sent once, and the first field to fill is ready. A code behind the `#` is traded for a session:
// it leaves the address bar and the history before anything is sent.

for (const form of document.forms) {
  form.addEventListener("submit", (event) => {
    if (form.dataset.sent) event.preventDefault();
    form.dataset.sent = "yes";
  });
}
addEventListener("pageshow", () => {
  for (const form of document.forms) delete form.dataset.sent;
});
document.querySelector('main :is(input:not([type="hidden"], [type="radio"], [type="checkbox"]), textarea, select)')?.focus();

const code = decodeURIComponent(location.hash.slice(1));
if (code && document.forms.code) {
  history.replaceState(null, "", location.pathname);
  document.forms.code.elements.code.value = code;
  document.forms.code.requestSubmit();
}
