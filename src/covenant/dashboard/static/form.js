// Form pages. A form is sent once. A login code after the `#` leaves the address and the history before it is sent; if
// somebody else may have made the link, only by a click.

for (const form of document.forms) {
  form.addEventListener("submit", (event) => {
    if (form.dataset.sent) event.preventDefault();
    form.dataset.sent = "yes";
  });
}
addEventListener("pageshow", () => {
  for (const form of document.forms) delete form.dataset.sent;
});

const code = decodeURIComponent(location.hash.slice(1));
if (code && document.forms.code) {
  history.replaceState(null, "", location.pathname);
  document.forms.code.elements.code.value = code;
  if (!document.forms.code.dataset.ask) document.forms.code.requestSubmit();
}
